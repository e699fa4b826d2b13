package v1beta1

import (
	"fmt"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// ClaimShutdownPolicy is the action on a claim that ended.
// +kubebuilder:validation:Enum=Delete;DeleteForeground;Retain
type ClaimShutdownPolicy string

// Claim shutdown policies.
const (
	// ClaimDelete removes the claim, its sandbox after it.
	ClaimDelete ClaimShutdownPolicy = "Delete"
	// ClaimDeleteForeground removes the claim once its sandbox is gone.
	ClaimDeleteForeground ClaimShutdownPolicy = "DeleteForeground"
	// ClaimRetain keeps the claim. The default.
	ClaimRetain ClaimShutdownPolicy = "Retain"
)

// SandboxWarmPoolRef names a pool of the same namespace.
type SandboxWarmPoolRef struct {
	// +kubebuilder:validation:MinLength=1
	Name string `json:"name"`
}

// ClaimLifecycle is when a claim ends, and the action then.
type ClaimLifecycle struct {
	// ShutdownTime is when the claim ends, and its sandbox with it. Unset: never.
	// +optional
	ShutdownTime *metav1.Time `json:"shutdownTime,omitempty"`
	// TTLSecondsAfterFinished counts from the end of the sandbox's work, in seconds.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TTLSecondsAfterFinished *int32 `json:"ttlSecondsAfterFinished,omitempty"`
	// +optional
	// +kubebuilder:default=Retain
	ShutdownPolicy ClaimShutdownPolicy `json:"shutdownPolicy,omitempty"`
}

// EnvVar is one variable that a claim brings.
type EnvVar struct {
	// Name is the variable's.
	// +kubebuilder:validation:MinLength=1
	Name string `json:"name"`
	// Value is the variable's. A claim with a reference in it, such as $(NAME), gets no running sandbox.
	// +optional
	Value string `json:"value,omitempty"`
	// ContainerName: empty means the first container.
	// +optional
	ContainerName string `json:"containerName,omitempty"`
}

// SandboxClaimSpec is a user's wish for one sandbox of a pool.
type SandboxClaimSpec struct {
	WarmPoolRef SandboxWarmPoolRef `json:"warmPoolRef"`
	// +optional
	Lifecycle *ClaimLifecycle `json:"lifecycle,omitempty"`
	// +optional
	AdditionalPodMetadata agents.PodMetadata `json:"additionalPodMetadata,omitempty"`
	// Env are variables that the sandbox gets with the claim, as far as envVarsInjectionPolicy of its template allows.
	// +optional
	// +listType=atomic
	Env []EnvVar `json:"env,omitempty"`
	// VolumeClaimTemplates are added to those of the template. Faults of their names are in the condition Ready, as upstream.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	VolumeClaimTemplates []agents.PersistentVolumeClaimTemplate `json:"volumeClaimTemplates,omitempty"`
}

// ClaimedSandbox is the sandbox that a claim got.
type ClaimedSandbox struct {
	// Name is the Sandbox's, in the claim's namespace.
	// +optional
	Name string `json:"name,omitempty"`
	// PodIPs are its addresses.
	// +optional
	// +listType=atomic
	PodIPs []string `json:"podIPs,omitempty"`
}

// SandboxClaimStatus is what the claim's controller last saw.
type SandboxClaimStatus struct {
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// +optional
	Sandbox ClaimedSandbox `json:"sandbox,omitempty"`
}

// Reasons of a claim's Ready condition, beside those of its sandbox.
const (
	ReasonTemplateNotFound      = "TemplateNotFound"
	ReasonWarmPoolNotFound      = "WarmPoolNotFound"
	ReasonAdoptionConflict      = "AdoptionConflict"
	ReasonSandboxCreatePending  = "SandboxCreatePending"
	ReasonInvalidMetadata       = "InvalidMetadata"
	ReasonEnvVarsRejected       = "EnvVarsInjectionRejected"
	ReasonVolumeClaimsError     = "VolumeClaimTemplatesError"
	ReasonClaimExpired          = "ClaimExpired"
	ReasonSandboxMissing        = "SandboxMissing"
	ReasonSandboxNotReady       = "SandboxNotReady"
	ReasonClaimReconcilerFailed = "ReconcilerError"
	// ReasonQueued and the two below are Barchan's additions. The claim waits in the queue for its namespace's quota; the message has its position.
	ReasonQueued = "Queued"
	// ReasonQueueTimeout is final until AnnotationQueueTimeout is raised or removed.
	ReasonQueueTimeout = "QueueTimeout"
	// ReasonQuotaExceeded is of a claim that does not queue. It is tried again.
	ReasonQuotaExceeded = "QuotaExceeded"
)

// AnnotationQueueTimeout on a claim is for how many seconds from its creation it waits for its namespace's quota, in the order of the
// requests: a whole number from 0, the default, to MaxQueueTimeout. An annotation, since typed clients of upstream can set one.
const AnnotationQueueTimeout = "barchan.dev/queue-timeout"

// MaxQueueTimeout is the longest wait for a quota.
const MaxQueueTimeout = 24 * time.Hour

// QueueTimeout returns how long a claim waits for its namespace's quota.
func QueueTimeout(c *SandboxClaim) (time.Duration, *field.Error) {
	text, given := c.Annotations[AnnotationQueueTimeout]
	if !given {
		return 0, nil
	}
	most := int64(MaxQueueTimeout / time.Second)
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > most {
		return 0, field.Invalid(field.NewPath("metadata", "annotations").Key(AnnotationQueueTimeout), text, fmt.Sprintf("must be a number of seconds from 0 to %d", most))
	}
	return time.Duration(n) * time.Second, nil
}

// SandboxClaim is a user's taking of one sandbox.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=sandboxclaim
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Sandbox",type=string,JSONPath=`.status.sandbox.name`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SandboxClaim struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              SandboxClaimSpec `json:"spec"`
	// +optional
	Status SandboxClaimStatus `json:"status,omitempty"`
}

// SandboxClaimList is a list of claims.
// +kubebuilder:object:root=true
type SandboxClaimList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxClaim `json:"items"`
}
