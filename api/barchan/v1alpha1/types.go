package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
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

// CheckpointOrigin is where a checkpoint's data come from.
// +kubebuilder:validation:Enum=Sandbox;Import
type CheckpointOrigin string

// Checkpoint origins.
const (
	// OriginSandbox takes them from a sandbox. The default.
	OriginSandbox CheckpointOrigin = "Sandbox"
	// OriginImport waits for `barchan snapshot import` to upload them.
	OriginImport CheckpointOrigin = "Import"
)

// CheckpointPhase is a checkpoint's stage.
type CheckpointPhase string

// Checkpoint phases.
const (
	CheckpointPending CheckpointPhase = "Pending" // nothing done yet, or waiting for the sandbox to suspend
	CheckpointWriting CheckpointPhase = "Writing" // data are being written
	CheckpointReady   CheckpointPhase = "Ready"   // durable; sandboxes may start from it
	CheckpointFailed  CheckpointPhase = "Failed"  // no data, permanently
)

// Condition type of a Checkpoint, and its reasons.
const (
	ConditionReady = "Ready"
	// ReasonWritten: it is Ready.
	ReasonWritten = "Written"
	// ReasonWaiting: the message names the cause; it is retried.
	ReasonWaiting = "Waiting"
	// ReasonFailed: permanently. The message names the cause.
	ReasonFailed = "Failed"
	// ReasonInUse: it was deleted, and is removed when those in the message no longer need it.
	ReasonInUse = "InUse"
)

// TenantLabel marks the namespaces in which the REST API of a cluster may write. Its value has no meaning.
const TenantLabel = "barchan.dev/tenant"

// NodeFinalizer keeps a Checkpoint object until its node confirmed that no data of it are left.
const NodeFinalizer = "barchan.dev/node"

// Labels of checkpoints.
const (
	// AnnotationImport is set by an importer when the data have reached the node, or the import has failed.
	// An RFC 3339 time with nanoseconds is the time of the last progress: an import that an earlier
	// process began has failed.
	AnnotationImport = "barchan.dev/import-changed"
	// LabelSandbox is the ID of the sandbox that it was taken from.
	LabelSandbox = "barchan.dev/sandbox-id"
	// LabelPurpose marks a checkpoint that the server made for temporary use; users' checkpoints have none.
	LabelPurpose = "barchan.dev/purpose"
	PurposeFork  = "fork"    // removed when the forks have started
	PurposeWarm  = "warm-up" // removed with its template's revision
	// LabelSnapshot is its name in the API; a name refers to its newest checkpoint.
	LabelSnapshot = "barchan.dev/snapshot"
	// AnnotationCreatedAt is when the API made a checkpoint or a key, as RFC 3339 with nanoseconds:
	// metadata.creationTimestamp has seconds, in which lists would have no order.
	AnnotationCreatedAt = "barchan.dev/created-at"
	// LabelTag distinguishes snapshots of one name.
	LabelTag = "barchan.dev/snapshot-tag"
)

// DefaultTag is the tag of a snapshot that was made without one, as an object.
const DefaultTag = agents.DefaultTag

// CheckpointSpec is what to keep of which sandbox. It cannot change, but for ttlSeconds.
// +kubebuilder:validation:XValidation:rule="self.sandboxName == oldSelf.sandboxName && self.content == oldSelf.content && self.origin == oldSelf.origin && (has(self.keepRunning) && self.keepRunning) == (has(oldSelf.keepRunning) && oldSelf.keepRunning)",message="only ttlSeconds can change"
type CheckpointSpec struct {
	// SandboxName is the source, in the same namespace. Of an import it is where the data were taken,
	// and names nothing here.
	// +kubebuilder:validation:MinLength=1
	SandboxName string `json:"sandboxName"`
	// Origin is where the data come from.
	// +optional
	// +kubebuilder:default=Sandbox
	Origin CheckpointOrigin `json:"origin,omitempty"`
	// KeepRunning keeps the source running; without it, the source is suspended first. A source
	// that is suspended stays so either way. Default false.
	// +optional
	KeepRunning bool `json:"keepRunning,omitempty"`
	// Content is what is kept: memory and files, or files only. Of a sandbox that has no memory to keep,
	// such as one of class runc, it is files only; status.content has the result.
	// +optional
	// +kubebuilder:default=MemoryAndFiles
	Content CheckpointContent `json:"content,omitempty"`
	// TTLSeconds is how long after its completion, or its failure, the checkpoint is deleted, in seconds.
	// Unset: it is kept until deleted.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TTLSeconds *int32 `json:"ttlSeconds,omitempty"`
}

// CheckpointSource is what is kept of the sandbox that a checkpoint was taken of, which may be gone.
type CheckpointSource struct {
	// ID of the sandbox.
	// +optional
	ID string `json:"id,omitempty"`
	// UID of the sandbox's object. Another sandbox of its name is never captured instead.
	// +optional
	UID types.UID `json:"uid,omitempty"`
	// Node is the machine that has the data.
	// +optional
	Node string `json:"node,omitempty"`
	// TemplateName is the template that the sandbox was made of, empty for none.
	// +optional
	TemplateName string `json:"templateName,omitempty"`
	// TemplateID is that template's ID.
	// +optional
	TemplateID string `json:"templateID,omitempty"`
	// TemplateNamespace is where that template lies.
	// +optional
	TemplateNamespace string `json:"templateNamespace,omitempty"`
	// Blueprint is the sandbox's podTemplate, volumeClaimTemplates and service, by which others are
	// made that start from the checkpoint.
	// +optional
	// +kubebuilder:pruning:PreserveUnknownFields
	Blueprint runtime.RawExtension `json:"blueprint,omitempty"`
	// Policies is the sandbox's spec.barchan, without its metadata, restore and resume.
	// +optional
	// +kubebuilder:pruning:PreserveUnknownFields
	Policies runtime.RawExtension `json:"policies,omitempty"`
	// Secrets is set if it holds environment variables that the sandbox was created with, and the
	// sandbox's spec.barchan.fork does not allow others to use them.
	// +optional
	Secrets bool `json:"secrets,omitempty"`
	// OwnVariables is set if the tenant itself sent all of Secrets by the E2B API: by that API it may
	// start sandboxes from the checkpoint without allowing it.
	// +optional
	OwnVariables bool `json:"ownVariables,omitempty"`
}

// CheckpointStatus is what the checkpoint's controller last saw.
type CheckpointStatus struct {
	// Phase is a summary: Pending, Writing, Ready or Failed.
	// +optional
	Phase CheckpointPhase `json:"phase,omitempty"`
	// SnapshotID is the checkpoint's ID in the E2B API and on the command line; empty for one that the
	// server made for its own use.
	// +optional
	SnapshotID string `json:"snapshotID,omitempty"`
	// Conditions has one, Ready. Its message names what a checkpoint waits for, why it failed, or what still
	// needs one that was deleted.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Content is what it holds: Files for a sandbox of class runc, regardless of the spec.
	// +optional
	Content CheckpointContent `json:"content,omitempty"`
	// Size on disk: memory and files together.
	// +optional
	Size *resource.Quantity `json:"size,omitempty"`
	// MemorySize on disk; unset where there is none.
	// +optional
	MemorySize *resource.Quantity `json:"memorySize,omitempty"`
	// Digest of the memory's data, "sha256:" and 64 hex digits; empty where there is none.
	// +optional
	Digest string `json:"digest,omitempty"`
	// Runtime is the class that it was taken of: gvisor or runc.
	// +optional
	Runtime string `json:"runtime,omitempty"`
	// RuntimeBuild is the runsc build that alone can restore the memory: its version and SHA-256.
	// +optional
	RuntimeBuild string `json:"runtimeBuild,omitempty"`
	// CPUFeatures are what a processor must have to restore the memory.
	// +optional
	// +listType=atomic
	CPUFeatures []string `json:"cpuFeatures,omitempty"`
	// Image is the digest of the image that the files lie on.
	// +optional
	Image string `json:"image,omitempty"`
	// Source is the sandbox that it was taken of.
	// +optional
	Source *CheckpointSource `json:"source,omitempty"`
	// CompletedAt is when the data were durable.
	// +optional
	CompletedAt *metav1.Time `json:"completedAt,omitempty"`
}

// Checkpoint is memory and files of a sandbox at one moment.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=ckpt
// +kubebuilder:printcolumn:name="ID",type=string,JSONPath=`.status.snapshotID`
// +kubebuilder:printcolumn:name="Sandbox",type=string,JSONPath=`.spec.sandboxName`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Content",type=string,JSONPath=`.status.content`
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.size`
// +kubebuilder:printcolumn:name="Memory",type=string,JSONPath=`.status.memorySize`,priority=1
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,priority=1
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
	// Scope is what the key's holder may do in the namespace: use its sandboxes, manage its templates, volumes and webhooks
	// too, or admin, everything. Default: admin.
	// +optional
	// +kubebuilder:validation:Enum=use;manage;admin
	Scope KeyScope `json:"scope,omitempty"`
	// SSHKeys are public keys of the key's holder, in the form of a line of OpenSSH's authorized_keys without options:
	// type, base64 and optionally a comment. They open sandboxes of the namespace over SSH, as long as this key is valid.
	// +optional
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=4096
	// +listType=atomic
	SSHKeys []string `json:"sshKeys,omitempty"`
}

// APIKeyStatus is what the server notes of a key.
type APIKeyStatus struct {
	// LastUsedAt is when the key was used last, exact to an hour. Unset: never.
	// +optional
	LastUsedAt *metav1.Time `json:"lastUsedAt,omitempty"`
}

// APIKey lets its holder act in the namespace that it lies in.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Prefix",type=string,JSONPath=`.spec.prefix`
// +kubebuilder:printcolumn:name="Description",type=string,JSONPath=`.spec.description`
// +kubebuilder:printcolumn:name="Scope",type=string,JSONPath=`.spec.scope`
// +kubebuilder:printcolumn:name="Expires",type=string,JSONPath=`.spec.expiresAt`
// +kubebuilder:printcolumn:name="Last used",type=date,JSONPath=`.status.lastUsedAt`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type APIKey struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              APIKeySpec `json:"spec"`
	// +optional
	Status APIKeyStatus `json:"status,omitempty"`
}

// APIKeyList is a list of keys.
// +kubebuilder:object:root=true
type APIKeyList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []APIKey `json:"items"`
}

// TemplateRevisionSpec is a past spec of a template. It cannot change.
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
