package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	// Wake says whether traffic wakes a suspended sandbox.
	// +optional
	Wake *WakePolicy `json:"wake,omitempty"`
	// Access says who may reach the sandbox through the gateway.
	// +optional
	Access *AccessPolicy `json:"access,omitempty"`
	// Network says what the sandbox may reach.
	// +optional
	Network *EgressPolicy `json:"network,omitempty"`
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

// BarchanStatus is what Barchan adds to a Sandbox's status.
type BarchanStatus struct {
	// ID is the sandbox ID: 20 lower-case letters and digits, derived from the UID.
	// +optional
	ID string `json:"id,omitempty"`
	// Phase is one word for people and clients: Pending, Starting, Running, Pausing, Paused, Resuming, Stopping, Dead.
	// +optional
	Phase string `json:"phase,omitempty"`
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
