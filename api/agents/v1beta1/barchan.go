package v1beta1

import (
	networkingv1 "k8s.io/api/networking/v1"
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

// ResumeMode is what a resume goes on with.
// +kubebuilder:validation:Enum=Memory;Files
type ResumeMode string

// Resume modes.
const (
	// ResumeMemory goes on with processes and memory, where they were kept. The default.
	ResumeMemory ResumeMode = "Memory"
	// ResumeFiles gives the memory up and starts anew from the files, for good.
	ResumeFiles ResumeMode = "Files"
)

// BoundSecrets says what becomes of what a claim brought when its sandbox is forked.
// +kubebuilder:validation:Enum=Refuse;Allow
type BoundSecrets string

// What may become of a claim's secrets.
const (
	// SecretsRefuse lets no other sandbox start from memory that holds them. The default.
	SecretsRefuse BoundSecrets = "Refuse"
	// SecretsAllow hands them on.
	SecretsAllow BoundSecrets = "Allow"
)

// BarchanSpec is what Barchan adds to a Sandbox. All of it is optional.
type BarchanSpec struct {
	// Metadata is the user's own, free in its keys; clients filter by it.
	// +optional
	Metadata map[string]string `json:"metadata,omitempty"`
	// OnTimeout is what happens at spec.shutdownTime.
	// +optional
	// +kubebuilder:default=Shutdown
	OnTimeout TimeoutAction `json:"onTimeout,omitempty"`
	// Suspend is what operatingMode Suspended keeps.
	// +optional
	// +kubebuilder:default=Memory
	Suspend SuspendMode `json:"suspend,omitempty"`
	// Resume is what the next resume goes on with. A resume from files is how a sandbox comes back
	// whose memory cannot: it was written by another build of the runtime, or is damaged.
	// +optional
	// +kubebuilder:default=Memory
	Resume ResumeMode `json:"resume,omitempty"`
	// Restore starts the sandbox from a checkpoint and not from its image. It cannot change.
	// +optional
	Restore *RestoreSource `json:"restore,omitempty"`
	// WarmUp is run in the sandbox before it is ready for the first time. Members of a warm pool are
	// restored from the checkpoint of one in which it has run.
	// +optional
	WarmUp *WarmUp `json:"warmUp,omitempty"`
	// Fork says what of the sandbox others may start with. Unset: all but what its claim brought.
	// +optional
	Fork *ForkPolicy `json:"fork,omitempty"`
	// Wake says whether traffic wakes a suspended sandbox.
	// +optional
	Wake *WakePolicy `json:"wake,omitempty"`
	// Idle says what becomes of the sandbox when nobody uses it. Unset: nothing.
	// +optional
	Idle *IdlePolicy `json:"idle,omitempty"`
	// Access says who may reach the sandbox through the gateway.
	// +optional
	Access *AccessPolicy `json:"access,omitempty"`
	// Network says what the sandbox may reach.
	// +optional
	Network *EgressPolicy `json:"network,omitempty"`
	// NetworkPolicy bounds what Network says: a packet leaves only where both allow it. Whoever
	// makes a sandbox of a template takes it over from the template's spec.networkPolicy; in a
	// template it stands there, and not here. Unset: no bounds.
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
	// with 0; whatever it leaves running stays.
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

// ForkPolicy says what of a sandbox others may start with.
type ForkPolicy struct {
	// Secrets says whether forks may have the environment variables that a claim brought: they are in
	// the memory, and cannot be taken out of it. Default Refuse.
	// +optional
	// +kubebuilder:default=Refuse
	Secrets BoundSecrets `json:"secrets,omitempty"`
}

// NetworkPolicy is what of a Kubernetes NetworkPolicy a sandbox is kept to.
type NetworkPolicy struct {
	// Egress lists what the sandbox may reach: what no rule allows is closed, so none at all close
	// everything. Peers that are Pods or namespaces allow nothing: no sandbox reaches any.
	// +optional
	// +listType=atomic
	Egress []networkingv1.NetworkPolicyEgressRule `json:"egress,omitempty"`
}

// WakePolicy says how a suspended sandbox comes back by itself.
type WakePolicy struct {
	// OnTraffic resumes the sandbox when a request for it arrives. Default false.
	// +optional
	OnTraffic bool `json:"onTraffic,omitempty"`
	// TimeoutSeconds is the sandbox's new time to live after such a wake, in seconds. Default 300.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TimeoutSeconds int32 `json:"timeoutSeconds,omitempty"`
}

// IdlePolicy says what becomes of a sandbox that has had no traffic for a time. Requests, open
// streams and WebSockets through the gateway count as traffic, calls of its agent among them; what
// the sandbox does by itself does not.
type IdlePolicy struct {
	// AfterSeconds is how long the sandbox may be without traffic, in seconds. A resume begins the
	// time anew, and so does a restart of the server.
	// +kubebuilder:validation:Minimum=1
	AfterSeconds int32 `json:"afterSeconds"`
	// Action is what happens then: Pause as by operatingMode Suspended, Shutdown as at
	// spec.shutdownTime. Default Pause.
	// +optional
	// +kubebuilder:default=Pause
	Action TimeoutAction `json:"action,omitempty"`
}

// AccessPolicy says who may reach a sandbox.
type AccessPolicy struct {
	// OpenAgent lets whoever knows the sandbox's ID run commands in it without its access token,
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

// EgressPolicy says what a sandbox may reach. Unset: public addresses only.
// +kubebuilder:validation:XValidation:rule="!has(self.allowOut) || self.allowOut.all(a, isIP(a) || isCIDR(a)) || (has(self.denyOut) && '0.0.0.0/0' in self.denyOut) || (has(self.internet) && !self.internet)",message="a domain name needs 0.0.0.0/0 in denyOut",fieldPath=".allowOut"
type EgressPolicy struct {
	// Internet false cuts all egress but AllowOut. Default true.
	// +optional
	// +kubebuilder:default=true
	Internet *bool `json:"internet,omitempty"`
	// AllowOut lists addresses, CIDRs and domain names that win over DenyOut.
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

// MemoryPlace is where the memory of a sandbox is that sleeps.
type MemoryPlace string

// Where the memory of a sandbox is that sleeps.
const (
	// MemoryInRAM is that of a sandbox which is frozen: it goes on in milliseconds, and holds its RAM meanwhile.
	MemoryInRAM MemoryPlace = "RAM"
	// MemoryOnDisk is that of a sandbox of which no process is left.
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
	// Memory is where the memory of a sandbox is that sleeps and keeps it: RAM or Disk. Empty of all others.
	// +optional
	Memory MemoryPlace `json:"memory,omitempty"`
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
}
