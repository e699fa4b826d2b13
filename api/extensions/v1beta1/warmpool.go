package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// UpdateStrategyType says what happens to the members of a pool whose template has changed.
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

// UpdateStrategy says how a pool follows its template.
type UpdateStrategy struct {
	// +optional
	// +kubebuilder:default=OnReplenish
	Type UpdateStrategyType `json:"type,omitempty"`
}

// SandboxWarmPoolSpec is how many ready sandboxes of which template to hold.
type SandboxWarmPoolSpec struct {
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	Replicas           *int32             `json:"replicas,omitempty"`
	SandboxTemplateRef SandboxTemplateRef `json:"sandboxTemplateRef"`
	// +optional
	// +kubebuilder:default={type:OnReplenish}
	UpdateStrategy *UpdateStrategy `json:"updateStrategy,omitempty"`
}

// SandboxWarmPoolStatus is what the pool's controller last saw.
type SandboxWarmPoolStatus struct {
	// Replicas counts active members.
	// +optional
	Replicas int32 `json:"replicas"`
	// +optional
	ReadyReplicas int32 `json:"readyReplicas"`
	// Selector finds the members, in the text form of a label selector.
	// +optional
	Selector string `json:"selector,omitempty"`
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Conditions say what the pool waits for; Barchan's addition.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// SandboxWarmPool holds ready sandboxes of one template.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:resource:shortName=swp
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyReplicas`
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=`.spec.replicas`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
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
