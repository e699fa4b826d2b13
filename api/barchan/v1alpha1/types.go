package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// CheckpointContent is what a checkpoint holds.
// +kubebuilder:validation:Enum=MemoryAndFiles;Files
type CheckpointContent string

// Checkpoint contents.
const (
	// ContentMemoryAndFiles is the default.
	ContentMemoryAndFiles CheckpointContent = "MemoryAndFiles"
	// ContentFiles holds no memory.
	ContentFiles CheckpointContent = "Files"
)

// CheckpointSpec is what to keep of which sandbox. It cannot change.
// +kubebuilder:validation:XValidation:rule="self.sandboxName == oldSelf.sandboxName && self.content == oldSelf.content",message="sandboxName and content are immutable"
type CheckpointSpec struct {
	// SandboxName is the source, in the same namespace.
	// +kubebuilder:validation:MinLength=1
	SandboxName string `json:"sandboxName"`
	// KeepRunning lets the source run on afterwards. Default false.
	// +optional
	KeepRunning bool `json:"keepRunning,omitempty"`
	// +optional
	// +kubebuilder:default=MemoryAndFiles
	Content CheckpointContent `json:"content,omitempty"`
	// TTLSeconds after completion, in seconds; unset: kept until deleted.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TTLSeconds *int32 `json:"ttlSeconds,omitempty"`
}

// CheckpointStatus is what the checkpoint's controller last saw.
type CheckpointStatus struct {
	// Phase: Pending, Writing, Ready or Failed.
	// +optional
	Phase string `json:"phase,omitempty"`
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Size on disk.
	// +optional
	Size *resource.Quantity `json:"size,omitempty"`
	// Digest of the data, "sha256:" and 64 hex digits.
	// +optional
	Digest string `json:"digest,omitempty"`
	// RuntimeBuild is the runsc build that alone can restore the memory.
	// +optional
	RuntimeBuild string `json:"runtimeBuild,omitempty"`
	// CompletedAt is when the data were durable.
	// +optional
	CompletedAt *metav1.Time `json:"completedAt,omitempty"`
}

// Checkpoint is memory and files of a sandbox at one moment.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=ckpt
// +kubebuilder:printcolumn:name="Sandbox",type=string,JSONPath=`.spec.sandboxName`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.size`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Checkpoint struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              CheckpointSpec `json:"spec"`
	// +optional
	Status CheckpointStatus `json:"status,omitempty"`
}

// CheckpointList is a list of checkpoints.
// +kubebuilder:object:root=true
type CheckpointList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Checkpoint `json:"items"`
}

// APIKeySpec is a key's hash; the key itself is shown once, at its creation, and stored nowhere.
// A rule of the whole spec checks the hash, since an error over a pattern, or over a rule of the
// field itself, repeats the value, which may be a key by mistake.
// +kubebuilder:validation:XValidation:rule="self.sha256.matches('^[0-9a-f]{64}$')",message="must be 64 lower-case hex digits",fieldPath=".sha256"
type APIKeySpec struct {
	// Description is the user's own note.
	// +optional
	Description string `json:"description,omitempty"`
	// SHA256 of the key's text, 64 lower-case hex digits.
	// +kubebuilder:validation:MaxLength=64
	SHA256 string `json:"sha256"`
	// Prefix is the start of the key, by which people recognise it.
	// +optional
	// +kubebuilder:validation:MaxLength=12
	Prefix string `json:"prefix,omitempty"`
	// ExpiresAt ends the key. Unset: never.
	// +optional
	ExpiresAt *metav1.Time `json:"expiresAt,omitempty"`
}

// APIKey lets its holder act in the namespace that it lies in.
// +kubebuilder:object:root=true
// +kubebuilder:printcolumn:name="Prefix",type=string,JSONPath=`.spec.prefix`
// +kubebuilder:printcolumn:name="Description",type=string,JSONPath=`.spec.description`
// +kubebuilder:printcolumn:name="Expires",type=string,JSONPath=`.spec.expiresAt`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type APIKey struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              APIKeySpec `json:"spec"`
}

// APIKeyList is a list of keys.
// +kubebuilder:object:root=true
type APIKeyList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []APIKey `json:"items"`
}

// TemplateRevisionSpec is what a template once said. It cannot change.
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a revision is immutable"
type TemplateRevisionSpec struct {
	// TemplateName is the SandboxTemplate, in the same namespace.
	// +kubebuilder:validation:MinLength=1
	TemplateName string `json:"templateName"`
	// Revision is the content's SHA-256, in 52 lower-case letters and digits.
	// +kubebuilder:validation:Pattern=`^[0-9a-v]{52}$`
	Revision string `json:"revision"`
	// Number counts a template's revisions from 1, in the order in which they were first seen.
	// +kubebuilder:validation:Minimum=1
	Number int64 `json:"number"`
	// Content is what was hashed: all of the template that decides what runs.
	// +kubebuilder:pruning:PreserveUnknownFields
	Content runtime.RawExtension `json:"content"`
}

// TemplateRevision is one entry of a template's history. It goes with its template.
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=trev
// +kubebuilder:printcolumn:name="Template",type=string,JSONPath=`.spec.templateName`
// +kubebuilder:printcolumn:name="Number",type=integer,JSONPath=`.spec.number`
// +kubebuilder:printcolumn:name="Revision",type=string,JSONPath=`.spec.revision`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type TemplateRevision struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              TemplateRevisionSpec `json:"spec"`
}

// TemplateRevisionList is a list of revisions.
// +kubebuilder:object:root=true
type TemplateRevisionList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []TemplateRevision `json:"items"`
}
