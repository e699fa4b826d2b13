package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// UpdateStrategyType is the action on the members of a pool when its template changes.
// +kubebuilder:validation:Enum=Recreate;OnReplenish
type UpdateStrategyType string

// Update strategies. Under both, a claim gets the current revision only.
const (
	// UpdateRecreate deletes stale members at once.
	UpdateRecreate UpdateStrategyType = "Recreate"
	// UpdateOnReplenish leaves stale members until they are replaced. The default.
	UpdateOnReplenish UpdateStrategyType = "OnReplenish"
)

// SandboxTemplateRef names a template of the same namespace.
type SandboxTemplateRef struct {
	// +kubebuilder:validation:MinLength=1
	Name string `json:"name"`
}

// UpdateStrategy is how a pool follows its template.
type UpdateStrategy struct {
	// +optional
	// +kubebuilder:default=OnReplenish
	Type UpdateStrategyType `json:"type,omitempty"`
}

// SandboxWarmPoolSpec is how many ready sandboxes of which template to hold.
type SandboxWarmPoolSpec struct {
	// Replicas is how many spare sandboxes to hold; those of claims do not count.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	Replicas           *int32             `json:"replicas,omitempty"`
	SandboxTemplateRef SandboxTemplateRef `json:"sandboxTemplateRef"`
	// +optional
	// +kubebuilder:default={type:OnReplenish}
	UpdateStrategy *UpdateStrategy `json:"updateStrategy,omitempty"`
	// Barchan holds what Barchan adds to the upstream kind.
	// +optional
	Barchan *WarmPoolBarchanSpec `json:"barchan,omitempty"`
}

// WarmPoolBarchanSpec is what Barchan adds to a SandboxWarmPool. All of it is optional.
// +kubebuilder:validation:XValidation:rule="!has(self.maxUnavailable) || (self.maxUnavailable != 0 && self.maxUnavailable != '0%') || (has(self.maxSurge) && self.maxSurge != 0 && self.maxSurge != '0%')",message="must not be 0 while maxSurge is 0",fieldPath=".maxUnavailable"
type WarmPoolBarchanSpec struct {
	// TemplateNamespace is where the template lies, if not beside the pool; it must be public there.
	// +optional
	TemplateNamespace string `json:"templateNamespace,omitempty"`
	// MaxSurge is how many members above the desired count may exist while Recreate replaces stale ones:
	// a number, or a share of the desired count. Default 0.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:Pattern=`^(100|[1-9]?[0-9])%$`
	// +kubebuilder:validation:XValidation:rule="type(self) != int || (self >= 0 && self <= 2147483647)",message="must be a number of 0 or more, or a share from 0% to 100%"
	MaxSurge *intstr.IntOrString `json:"maxSurge,omitempty"`
	// MaxUnavailable is how many of the desired members, current or stale, may be missing or unready
	// while Recreate replaces stale ones: a number, or a share of the desired count. Default 100%, which
	// deletes all stale members at once, as upstream does.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:Pattern=`^(100|[1-9]?[0-9])%$`
	// +kubebuilder:validation:XValidation:rule="type(self) != int || (self >= 0 && self <= 2147483647)",message="must be a number of 0 or more, or a share from 0% to 100%"
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
	// Autoscale sizes the pool by its use; spec.replicas is then ignored.
	// +optional
	Autoscale *PoolAutoscale `json:"autoscale,omitempty"`
}

// PoolAutoscale is how a pool follows its use.
// +kubebuilder:validation:XValidation:rule="!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",message="must not be greater than maxReplicas",fieldPath=".minReplicas"
type PoolAutoscale struct {
	// MinReplicas is the least number of members. Default 0.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MinReplicas int32 `json:"minReplicas,omitempty"`
	// MaxReplicas is the greatest number of members.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	MaxReplicas int32 `json:"maxReplicas"`
	// SparePercent is the desired share of spare members among the pool's members and the live
	// sandboxes that were claimed through it. Default 20.
	// +optional
	// +kubebuilder:default=20
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=99
	SparePercent int32 `json:"sparePercent,omitempty"`
	// IdleSeconds without a claim let the pool shrink to MinReplicas; until then it keeps one
	// member at least. Default 600.
	// +optional
	// +kubebuilder:default=600
	// +kubebuilder:validation:Minimum=1
	IdleSeconds int32 `json:"idleSeconds,omitempty"`
}

// SandboxWarmPoolStatus is what the pool's controller last saw.
type SandboxWarmPoolStatus struct {
	// Replicas counts active members.
	// +optional
	Replicas int32 `json:"replicas"`
	// ReadyReplicas counts members that a claim can get at once.
	// +optional
	ReadyReplicas int32 `json:"readyReplicas"`
	// Selector finds the members, in the text form of a label selector.
	// +optional
	Selector string `json:"selector,omitempty"`
	// ObservedGeneration is the generation of the spec that this status is of.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// CurrentRevision of the template, which alone claims get; Barchan's addition.
	// +optional
	CurrentRevision string `json:"currentRevision,omitempty"`
	// Barchan holds what Barchan adds to the upstream kind.
	// +optional
	Barchan *WarmPoolBarchanStatus `json:"barchan,omitempty"`
	// Conditions report what the pool waits for; Barchan's addition.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// WarmPoolBarchanStatus is what Barchan adds to a SandboxWarmPool's status.
type WarmPoolBarchanStatus struct {
	// DesiredReplicas is how many members are desired now.
	// +optional
	DesiredReplicas int32 `json:"desiredReplicas"`
	// CurrentReplicas counts the members of the current revision, CurrentReadyReplicas the ready of them.
	// +optional
	CurrentReplicas int32 `json:"currentReplicas"`
	// +optional
	CurrentReadyReplicas int32 `json:"currentReadyReplicas"`
	// ClaimedReplicas counts the live sandboxes that were claimed through the pool.
	// +optional
	ClaimedReplicas int32 `json:"claimedReplicas"`
	// LastClaimTime is when the controller last saw a new claim.
	// +optional
	LastClaimTime *metav1.Time `json:"lastClaimTime,omitempty"`
}

// Conditions of a pool.
const (
	// PoolReady is true when the desired number of members of the current revision is ready.
	PoolReady = "Ready"
	// PoolProgressing is true while members are made, removed or replaced.
	PoolProgressing = "Progressing"
)

// Reasons of a pool's conditions, beside ReasonTemplateNotFound.
const (
	ReasonPoolFull       = "Full"
	ReasonPoolFilling    = "Filling"
	ReasonPoolShrinking  = "Shrinking"
	ReasonPoolRollingOut = "RollingOut"
	ReasonPoolIdle       = "Idle"
	ReasonMembersFailing = "MembersFailing"
	// ReasonPoolWarmingUp: members wait for the checkpoint of a sandbox in which their template's
	// warm-up runs. ReasonWarmUpFailed: it failed there, and is tried again.
	ReasonPoolWarmingUp   = "WarmingUp"
	ReasonWarmUpFailed    = "WarmUpFailed"
	ReasonTemplateInvalid = "TemplateInvalid"
	ReasonTemplatePrivate = "TemplatePrivate"
)

// SandboxWarmPool holds ready sandboxes of one template.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:resource:shortName=swp
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyReplicas`
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=`.spec.replicas`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Revision",type=string,JSONPath=`.status.currentRevision`,priority=1
// +kubebuilder:printcolumn:name="Status",type=string,JSONPath=`.status.conditions[?(@.type=="Progressing")].reason`,priority=1
type SandboxWarmPool struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              SandboxWarmPoolSpec `json:"spec"`
	// +optional
	Status SandboxWarmPoolStatus `json:"status,omitempty"`
}

// SandboxWarmPoolList is a list of pools.
// +kubebuilder:object:root=true
type SandboxWarmPoolList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxWarmPool `json:"items"`
}
