package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TimeoutAction is what happens at a sandbox's shutdown time.
// +kubebuilder:validation:Enum=Shutdown;Pause
type TimeoutAction string

// Timeout actions.
const (
	// TimeoutShutdown follows the upstream shutdownPolicy. The default.
	TimeoutShutdown TimeoutAction = "Shutdown"
	// TimeoutPause suspends the sandbox; shutdownTime is cleared.
	TimeoutPause TimeoutAction = "Pause"
)

// SuspendMode is what a suspended sandbox keeps.
// +kubebuilder:validation:Enum=Memory;Files;Delete
type SuspendMode string

// Suspend modes.
const (
	// SuspendMemory keeps processes, memory and files. The default.
	SuspendMemory SuspendMode = "Memory"
	// SuspendFiles keeps files and ends the processes.
	SuspendFiles SuspendMode = "Files"
	// SuspendDelete keeps volumes only, as upstream does.
	SuspendDelete SuspendMode = "Delete"
)

// ResumeMode is what a resume starts from.
// +kubebuilder:validation:Enum=Memory;Files
type ResumeMode string

// Resume modes.
const (
	// ResumeMemory restores processes and memory, where they were kept. The default.
	ResumeMemory ResumeMode = "Memory"
	// ResumeFiles discards the memory permanently and restarts from the files.
	ResumeFiles ResumeMode = "Files"
)

// BoundSecrets decides whether forks get the secrets of the source's claim.
// +kubebuilder:validation:Enum=Refuse;Allow
type BoundSecrets string

// Handling of a claim's secrets.
const (
	// SecretsRefuse prevents other sandboxes from starting from memory that holds them. The default.
	SecretsRefuse BoundSecrets = "Refuse"
	// SecretsAllow passes them on.
	SecretsAllow BoundSecrets = "Allow"
)

// BarchanSpec is what Barchan adds to a Sandbox. All of it is optional.
type BarchanSpec struct {
	// Metadata is the user's own, free in its keys; clients filter by it.
	// +optional
	Metadata map[string]string `json:"metadata,omitempty"`
	// OnTimeout is what happens at spec.shutdownTime. A Pod of a cluster is paused only with suspend Delete, and shut down otherwise.
	// +optional
	// +kubebuilder:default=Shutdown
	OnTimeout TimeoutAction `json:"onTimeout,omitempty"`
	// Suspend is what operatingMode Suspended keeps. A Pod of a cluster has no memory or root file system to keep: there
	// only Delete can be suspended.
	// +optional
	// +kubebuilder:default=Memory
	Suspend SuspendMode `json:"suspend,omitempty"`
	// Resume is what the next resume starts from. Files recovers a sandbox whose memory cannot be restored
	// because it is damaged or another build of the runtime wrote it.
	// +optional
	// +kubebuilder:default=Memory
	Resume ResumeMode `json:"resume,omitempty"`
	// Restore starts the sandbox from a checkpoint and not from its image. It cannot change. Refused in a cluster, where
	// a sandbox is a Pod.
	// +optional
	Restore *RestoreSource `json:"restore,omitempty"`
	// WarmUp is run in the sandbox before it is ready for the first time. Members of a warm pool are
	// restored from the checkpoint of one in which it has run. Refused in a cluster, where a sandbox is a Pod.
	// +optional
	WarmUp *WarmUp `json:"warmUp,omitempty"`
	// DefaultUser runs the programs of requests that name no user: a name or an ID, with ":" and a group if wanted. Default: the
	// container's, else "user" where the image has it, else root. It has no effect in a Pod of a cluster.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^([^:\s]+(:[^:\s]+)?)?$`
	DefaultUser string `json:"defaultUser,omitempty"`
	// Fork restricts what forks take from the sandbox. Unset: all but the environment variables of its claim.
	// +optional
	Fork *ForkPolicy `json:"fork,omitempty"`
	// Wake configures resumes of a suspended sandbox by traffic.
	// +optional
	Wake *WakePolicy `json:"wake,omitempty"`
	// Idle is the action for a sandbox without traffic. Unset: none.
	// +optional
	Idle *IdlePolicy `json:"idle,omitempty"`
	// Access restricts access to the sandbox through the gateway.
	// +optional
	Access *AccessPolicy `json:"access,omitempty"`
	// Network restricts the sandbox's outbound traffic.
	// +optional
	Network *EgressPolicy `json:"network,omitempty"`
	// NetworkPolicy further restricts Network: a packet leaves only where both allow it. The creator of a
	// sandbox copies it from the template's spec.networkPolicy; in a template itself it must be unset.
	// Unset: no further restriction.
	// +optional
	NetworkPolicy *NetworkPolicy `json:"networkPolicy,omitempty"`
}

// RestoreSource is a checkpoint that a sandbox starts from. The sandbox must be made as the one that
// was checkpointed: of the same image, runtime class, command, user, security context, memory
// limit and volumes.
type RestoreSource struct {
	// CheckpointName is a Checkpoint in the same namespace.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	CheckpointName string `json:"checkpointName"`
	// FilesOnly leaves out the memory, where the checkpoint has any. Default false.
	// +optional
	FilesOnly bool `json:"filesOnly,omitempty"`
}

// WarmUp is a program that prepares a sandbox, such as one that loads an interpreter and leaves it
// running in the background.
type WarmUp struct {
	// Command is the program with its arguments, run by the agent as its default user. It must end
	// with 0; its background processes stay.
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:XValidation:rule="self.size() == 0 || self[0] != ''",message="must name a program"
	Command []string `json:"command"`
	// TimeoutSeconds bounds it, in seconds. Default 300.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	TimeoutSeconds int32 `json:"timeoutSeconds,omitempty"`
}

// ForkPolicy restricts what forks take from a sandbox.
type ForkPolicy struct {
	// Secrets decides whether forks may have the environment variables of a claim: they are in
	// the memory, and cannot be taken out of it. Default Refuse.
	// +optional
	// +kubebuilder:default=Refuse
	Secrets BoundSecrets `json:"secrets,omitempty"`
}

// NetworkPolicy is what of a Kubernetes NetworkPolicy a sandbox is kept to.
type NetworkPolicy struct {
	// Ingress lists what may reach the sandbox in a cluster, besides Barchan's gateways and controllers. On one machine
	// it has no effect: only the gateway reaches a sandbox.
	// +optional
	// +listType=atomic
	Ingress []networkingv1.NetworkPolicyIngressRule `json:"ingress,omitempty"`
	// Egress lists what the sandbox may reach: what no rule allows is closed, so none at all close
	// everything. Peers that are Pods or namespaces allow something in a cluster only: on one machine no sandbox
	// reaches any.
	// +optional
	// +listType=atomic
	Egress []networkingv1.NetworkPolicyEgressRule `json:"egress,omitempty"`
}

// WakePolicy configures resumes of a suspended sandbox by traffic.
type WakePolicy struct {
	// OnTraffic resumes the sandbox when a request for it arrives. Default false.
	// +optional
	OnTraffic bool `json:"onTraffic,omitempty"`
	// TimeoutSeconds is the sandbox's new time to live after such a wake, in seconds. Default 300.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TimeoutSeconds int32 `json:"timeoutSeconds,omitempty"`
}

// IdlePolicy is the action for a sandbox without traffic for some time. Requests, open
// streams and WebSockets through the gateway count as traffic, calls of its agent among them; what
// the sandbox does on its own does not.
type IdlePolicy struct {
	// AfterSeconds is how long the sandbox may be without traffic, in seconds. A resume and a restart of
	// the server start the time again.
	// +kubebuilder:validation:Minimum=1
	AfterSeconds int32 `json:"afterSeconds"`
	// Action is what happens then: Pause as by operatingMode Suspended, Shutdown as at
	// spec.shutdownTime. Default Pause.
	// +optional
	// +kubebuilder:default=Pause
	Action TimeoutAction `json:"action,omitempty"`
}

// AccessPolicy restricts access to a sandbox.
type AccessPolicy struct {
	// OpenAgent lets any client with the sandbox's ID run commands in it without its access token,
	// and every process in it drive the agent. Default false.
	// +optional
	OpenAgent bool `json:"openAgent,omitempty"`
	// PublicTraffic lets requests to ports other than the agent's pass without a traffic token. Default true.
	// +optional
	// +kubebuilder:default=true
	PublicTraffic *bool `json:"publicTraffic,omitempty"`
	// MaskRequestHost replaces the Host that a service in the sandbox sees; ${PORT} stands for the port.
	// +optional
	MaskRequestHost string `json:"maskRequestHost,omitempty"`
	// RequestsPerSecond bounds the requests that pass the gateway, with bursts of as many. What is
	// beyond is answered 429. 0: the gateway's own setting.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RequestsPerSecond int32 `json:"requestsPerSecond,omitempty"`
}

// EgressPolicy restricts outbound traffic. Unset: public addresses only.
// +kubebuilder:validation:XValidation:rule="!has(self.allowOut) || self.allowOut.all(a, isIP(a) || isCIDR(a)) || (has(self.denyOut) && '0.0.0.0/0' in self.denyOut) || (has(self.internet) && !self.internet)",message="a domain name needs 0.0.0.0/0 in denyOut",fieldPath=".allowOut"
type EgressPolicy struct {
	// Internet false cuts all egress but AllowOut. Default true.
	// +optional
	// +kubebuilder:default=true
	Internet *bool `json:"internet,omitempty"`
	// AllowOut lists addresses, CIDRs and domain names that win over DenyOut. Domain names are refused in a cluster, where a
	// sandbox is a Pod.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MaxLength=253
	// +kubebuilder:validation:items:XValidation:rule="isIP(self) || isCIDR(self) || self.matches('^([*][.])?[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",message="must be an IP address, a CIDR or a domain name"
	AllowOut []string `json:"allowOut,omitempty"`
	// DenyOut lists addresses and CIDRs.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1000
	// +kubebuilder:validation:items:MaxLength=253
	// +kubebuilder:validation:items:XValidation:rule="isIP(self) || isCIDR(self)",message="must be an IP address or a CIDR"
	DenyOut []string `json:"denyOut,omitempty"`
}

// MemoryPlace is where the memory of a suspended sandbox is.
type MemoryPlace string

// Places of a suspended sandbox's memory.
const (
	// MemoryInRAM is that of a frozen sandbox: it resumes in milliseconds and occupies RAM until then.
	MemoryInRAM MemoryPlace = "RAM"
	// MemoryOnDisk is that of a sandbox without processes.
	MemoryOnDisk MemoryPlace = "Disk"
)

// BarchanStatus is what Barchan adds to a Sandbox's status.
type BarchanStatus struct {
	// ID is the sandbox ID: 20 lower-case letters and digits, derived from the UID.
	// +optional
	ID string `json:"id,omitempty"`
	// Phase is one word for people and clients: Pending, Starting, Running, Pausing, Paused, Resuming, Stopping, Dead.
	// +optional
	Phase string `json:"phase,omitempty"`
	// Memory is where a suspended sandbox's memory is kept: RAM or Disk. Empty for all others.
	// +optional
	Memory MemoryPlace `json:"memory,omitempty"`
	// MemorySize is the size in bytes of the memory on disk, which counts against the namespace's quota of stored bytes. The node
	// sets it when the memory is written, and a resume clears it.
	// +optional
	MemorySize *resource.Quantity `json:"memorySize,omitempty"`
	// StartedAt is when the sandbox last began to run: at its start, or at a resume.
	// +optional
	StartedAt *metav1.Time `json:"startedAt,omitempty"`
	// Runtime is the class that runs it: gvisor or runc.
	// +optional
	Runtime string `json:"runtime,omitempty"`
	// Image is the digest of the image that it runs.
	// +optional
	Image string `json:"image,omitempty"`
	// ExitCode of the template's entrypoint, once that has ended.
	// +optional
	ExitCode *int32 `json:"exitCode,omitempty"`
	// Containers are the containers besides the first.
	// +optional
	// +listType=map
	// +listMapKey=name
	Containers []ContainerStatus `json:"containers,omitempty"`
	// Operations are what the node did with the sandbox: the last of each kind, oldest first. The node writes them with the state
	// that they lead to, a Bind with the next one. A Pod of a cluster has none.
	// +optional
	// +listType=map
	// +listMapKey=operation
	// +kubebuilder:validation:MaxItems=8
	Operations []OperationStatus `json:"operations,omitempty"`
}

// OperationType is what a node does with a sandbox.
// +kubebuilder:validation:Enum=Create;Restore;Restart;Resume;Suspend;Store;Bind
type OperationType string

// Operations of a node.
const (
	// OperationCreate starts a sandbox from its image.
	OperationCreate OperationType = "Create"
	// OperationRestore starts a sandbox from a checkpoint.
	OperationRestore OperationType = "Restore"
	// OperationRestart replaces the container of a sandbox, which has ended.
	OperationRestart OperationType = "Restart"
	// OperationResume continues a suspended sandbox, from RAM or from disk.
	OperationResume OperationType = "Resume"
	// OperationSuspend freezes a sandbox, or ends its processes where only files or volumes are kept.
	OperationSuspend OperationType = "Suspend"
	// OperationStore moves the memory of a frozen sandbox to disk.
	OperationStore OperationType = "Store"
	// OperationBind gives a running sandbox the variables of its claim.
	OperationBind OperationType = "Bind"
)

// OperationStatus is an operation that has succeeded, with the time of its steps.
type OperationStatus struct {
	Operation OperationType    `json:"operation"`
	StartedAt metav1.MicroTime `json:"startedAt"`
	// Milliseconds is how long all of it took.
	// +kubebuilder:validation:Minimum=0
	Milliseconds int64 `json:"milliseconds"`
	// Steps are in the order in which they began. Some run at the same time, or are a part of another. Those of less than half a
	// millisecond are left out.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Steps []StepStatus `json:"steps,omitempty"`
}

// MaxOperationSteps bounds the steps of an OperationStatus.
const MaxOperationSteps = 32

// StepStatus is the time of one step of an operation.
type StepStatus struct {
	// Name is the label of the step in the metric barchan_node_step_seconds, where that has it.
	Name string `json:"name"`
	// After is when the step began, in milliseconds since the operation's start.
	// +kubebuilder:validation:Minimum=0
	After int64 `json:"after"`
	// Milliseconds is how long it took.
	// +kubebuilder:validation:Minimum=0
	Milliseconds int64 `json:"milliseconds"`
}

// ContainerStatus is the state of a container besides the first of a sandbox.
type ContainerStatus struct {
	Name string `json:"name"`
	// Image is the digest of the image that it runs.
	// +optional
	Image string `json:"image,omitempty"`
	// Ready means that its program runs and its readiness probe succeeds.
	Ready bool `json:"ready"`
	// RestartCount counts the starts of its program after the first.
	RestartCount int32 `json:"restartCount"`
	// State is what its program does, and LastState how the run before ended.
	// +optional
	State corev1.ContainerState `json:"state,omitempty"`
	// +optional
	LastState corev1.ContainerState `json:"lastState,omitempty"`
}

// Reason is one word for the state: Running, or why it does not run.
func (c *ContainerStatus) Reason() string {
	switch {
	case c.State.Waiting != nil:
		return c.State.Waiting.Reason
	case c.State.Terminated != nil:
		return c.State.Terminated.Reason
	}
	return "Running"
}
