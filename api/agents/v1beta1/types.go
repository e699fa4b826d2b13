package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ShutdownPolicy is the action on a Sandbox object after its shutdown time.
// +kubebuilder:validation:Enum=Delete;Retain
type ShutdownPolicy string

// Shutdown policies.
const (
	// ShutdownDelete removes the Sandbox object.
	ShutdownDelete ShutdownPolicy = "Delete"
	// ShutdownRetain keeps the object and removes its container. The default.
	ShutdownRetain ShutdownPolicy = "Retain"
)

// OperatingMode is the desired state of a Sandbox.
// +kubebuilder:validation:Enum=Running;Suspended
type OperatingMode string

// Operating modes.
const (
	// ModeRunning is the default.
	ModeRunning OperatingMode = "Running"
	// ModeSuspended stops the computation and keeps what [BarchanSpec.Suspend] names.
	ModeSuspended OperatingMode = "Suspended"
)

// PodMetadata is the part of a Pod's metadata that a template may set.
type PodMetadata struct {
	// +optional
	Labels map[string]string `json:"labels,omitempty"`
	// +optional
	Annotations map[string]string `json:"annotations,omitempty"`
}

// PodTemplate describes the Pod, or on one machine the container, of a sandbox.
type PodTemplate struct {
	// Spec is a core/v1 PodSpec. What a node cannot honour is refused by the field's name.
	Spec corev1.PodSpec `json:"spec"`
	// +optional
	ObjectMeta PodMetadata `json:"metadata,omitempty"`
}

// EmbeddedObjectMetadata is the metadata of a volume claim template.
type EmbeddedObjectMetadata struct {
	// Name of the claim, a DNS label; the claim's object is called <name>-<sandbox>.
	// +required
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name,omitempty"`
	// +optional
	Labels map[string]string `json:"labels,omitempty"`
	// +optional
	Annotations map[string]string `json:"annotations,omitempty"`
}

// PersistentVolumeClaimTemplate is one volume that a sandbox keeps for its whole life.
type PersistentVolumeClaimTemplate struct {
	// +required
	EmbeddedObjectMetadata `json:"metadata,omitempty"`
	Spec                   corev1.PersistentVolumeClaimSpec `json:"spec"`
}

// SandboxBlueprint is what Sandbox and SandboxTemplate have in common: all that decides what runs.
type SandboxBlueprint struct {
	PodTemplate PodTemplate `json:"podTemplate"`
	// VolumeClaimTemplates cannot change once the sandbox exists. No two have one name.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:XValidation:rule="self.all(a, self.exists_one(b, a.metadata.name == b.metadata.name))",message="no two volumes may have one name"
	VolumeClaimTemplates []PersistentVolumeClaimTemplate `json:"volumeClaimTemplates,omitempty"`
	// Service: unset keeps an existing Service and makes none, true makes a headless one, false deletes it.
	// +optional
	Service *bool `json:"service,omitempty"`
}

// SandboxSpec is the desired state of a sandbox.
// +kubebuilder:validation:XValidation:rule="(has(self.barchan) && has(self.barchan.restore)) == (has(oldSelf.barchan) && has(oldSelf.barchan.restore)) && (!has(self.barchan) || !has(self.barchan.restore) || self.barchan.restore == oldSelf.barchan.restore)",message="is immutable",fieldPath=".barchan"
// +kubebuilder:validation:XValidation:rule="(has(self.volumeClaimTemplates) ? self.volumeClaimTemplates.size() : 0) == (has(oldSelf.volumeClaimTemplates) ? oldSelf.volumeClaimTemplates.size() : 0) && (!has(self.volumeClaimTemplates) || !has(oldSelf.volumeClaimTemplates) || self.volumeClaimTemplates == oldSelf.volumeClaimTemplates)",message="volumeClaimTemplates is immutable",fieldPath=".volumeClaimTemplates"
type SandboxSpec struct {
	SandboxBlueprint `json:",inline"`
	// ShutdownTime is when the sandbox ends. Unset: never.
	// +optional
	ShutdownTime *metav1.Time `json:"shutdownTime,omitempty"`
	// ShutdownPolicy is the action on the object at ShutdownTime.
	// +optional
	// +kubebuilder:default=Retain
	ShutdownPolicy ShutdownPolicy `json:"shutdownPolicy,omitempty"`
	// +optional
	// +kubebuilder:default=Running
	OperatingMode OperatingMode `json:"operatingMode,omitempty"`
	// Barchan holds what Barchan adds to the upstream kind.
	// +optional
	Barchan *BarchanSpec `json:"barchan,omitempty"`
}

// SandboxStatus is what the sandbox's controller last saw. Users never write it.
type SandboxStatus struct {
	// ServiceFQDN is the name of the Service in the DNS of the cluster.
	// +optional
	ServiceFQDN string `json:"serviceFQDN,omitempty"`
	// Service is the name of the headless Service, where there is one.
	// +optional
	Service string `json:"service,omitempty"`
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Selector finds the Pods of the sandbox, in the text form of a label selector.
	// +optional
	Selector string `json:"selector,omitempty"`
	// PodIPs are the addresses of the sandbox while it runs.
	// +optional
	// +listType=atomic
	PodIPs []string `json:"podIPs,omitempty"`
	// NodeName is the node on which the sandbox runs, or ran last.
	// +optional
	NodeName string `json:"nodeName,omitempty"`
	// Barchan holds what Barchan adds to the upstream kind.
	// +optional
	Barchan *BarchanStatus `json:"barchan,omitempty"`
}

// Sandbox is one isolated computer with a stable identity.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=sandbox
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Sandbox struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              SandboxSpec `json:"spec"`
	// +optional
	Status SandboxStatus `json:"status,omitempty"`
}

// SandboxList is a list of sandboxes.
// +kubebuilder:object:root=true
type SandboxList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Sandbox `json:"items"`
}
