package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TemplateBuildPhase is a build's stage.
type TemplateBuildPhase string

// Phases of template builds.
const (
	BuildPending  TemplateBuildPhase = "Pending"  // waits for spec.from, or for other builds
	BuildBuilding TemplateBuildPhase = "Building" // its steps run
	BuildReady    TemplateBuildPhase = "Ready"    // the template has its result
	BuildFailed   TemplateBuildPhase = "Failed"   // permanently; the template is as before
)

// BuildStepType is what a step does.
// +kubebuilder:validation:Enum=Run;Copy;Workdir;User;Env
type BuildStepType string

// Types of build steps.
const (
	// StepRun runs a command. Args: the command for a shell, and the user, if not the current one.
	StepRun BuildStepType = "Run"
	// StepCopy copies uploaded files, or files of a stage. Args: source, destination, and, where not empty, owner and octal mode.
	StepCopy BuildStepType = "Copy"
	// StepWorkdir sets the working directory, and makes it. Args: the path.
	StepWorkdir BuildStepType = "Workdir"
	// StepUser sets the user of later steps and of the template's sandboxes. Args: a name or an ID, with ":" and a group if wanted.
	StepUser BuildStepType = "User"
	// StepEnv sets environment variables. Args: names and values in turn.
	StepEnv BuildStepType = "Env"
)

// Where a build failed, if in none of its numbered steps; status.failedStep.
const (
	BuildStepBase     = "base"
	BuildStepFinalize = "finalize"
)

// Bounds of status.log, in lines, and in bytes of a line.
const (
	BuildLogLines = 20
	BuildLogLine  = 400
)

// Labels and annotations of builds.
const (
	// LabelBuild names the TemplateBuild that a template, a sandbox or a checkpoint was last made by.
	LabelBuild = "barchan.dev/template-build"
	// PurposeBuild is the LabelPurpose of a checkpoint with the result of a build's steps.
	PurposeBuild = "template-build"
	// AnnotationUsedAt is when a build last used such a checkpoint, as RFC 3339 with nanoseconds.
	AnnotationUsedAt = "barchan.dev/used-at"
	// AnnotationTaggedAt is when a template, which is a tag, last got its build, as RFC 3339 with nanoseconds.
	AnnotationTaggedAt = "barchan.dev/tagged-at"
)

// BuildSource is what a build starts from: an image or a template.
// +kubebuilder:validation:XValidation:rule="(has(self.image) && self.image.size() > 0) != (has(self.templateName) && self.templateName.size() > 0)",message="must name either an image or a template"
type BuildSource struct {
	// Image is an image's name. Its entrypoint is not run.
	// +optional
	Image string `json:"image,omitempty"`
	// ImagePullSecrets are Secrets of this namespace with credentials for the image's registry, at most 16.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	ImagePullSecrets []corev1.LocalObjectReference `json:"imagePullSecrets,omitempty"`
	// TemplateName is a template of this namespace, or a public one.
	// +optional
	TemplateName string `json:"templateName,omitempty"`
}

// BuildStage is a chain of steps besides the template's own, whose files other steps take. It is run if such a step is.
type BuildStage struct {
	// Name is what steps call it: lower-case letters, digits and dashes.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	Name string `json:"name"`
	// From is what the stage starts from.
	From BuildSource `json:"from"`
	// Steps are done in this order. A stage without steps has the files of from; its image needs no shell.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	Steps []BuildStep `json:"steps,omitempty"`
}

// StageFiles are files of a stage.
type StageFiles struct {
	// Stage is the name of a stage that is listed before the step's own.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Stage string `json:"stage"`
	// Paths are more sources of a Copy, besides that of args. Wildcards are allowed in all.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=4096
	Paths []string `json:"paths,omitempty"`
	// Exclude are patterns of files that are left out, as in .dockerignore, relative to the sources.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=4096
	Exclude []string `json:"exclude,omitempty"`
	// Parents keeps the sources' directories, from the root or from "/./" in their paths.
	// +optional
	Parents bool `json:"parents,omitempty"`
}

// BuildMountType is what a directory or file has that a Run sees, and that is no part of its result.
// +kubebuilder:validation:Enum=Cache;Bind;Tmpfs;Secret
type BuildMountType string

// Types of mounts.
const (
	// MountCache is a directory that later steps with the same ID in this namespace see as the last of them left it.
	MountCache BuildMountType = "Cache"
	// MountBind has uploaded files, or files of a stage. Changes of them are dropped.
	MountBind BuildMountType = "Bind"
	// MountTmpfs is an empty directory in memory.
	MountTmpfs BuildMountType = "Tmpfs"
	// MountSecret is a file in memory, or a variable, with a secret that came with the start of the build by the REST API.
	MountSecret BuildMountType = "Secret"
)

// CacheSharing says what steps do that use a cache at the same time.
// +kubebuilder:validation:Enum=Shared;Private;Locked
type CacheSharing string

// Kinds of sharing. With Shared, the default, and Private each step has a copy of its own, and the last to end is kept.
const (
	SharingShared  CacheSharing = "Shared"
	SharingPrivate CacheSharing = "Private"
	SharingLocked  CacheSharing = "Locked" // one waits for the other
)

// BuildMount is what a Run sees besides its files.
type BuildMount struct {
	Type BuildMountType `json:"type"`
	// Target is the absolute path. A Secret without one is at /run/secrets, by its ID.
	// +optional
	// +kubebuilder:validation:MaxLength=4096
	Target string `json:"target,omitempty"`
	// ID names a Cache, by default its target, or a Secret, which needs it.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	ID string `json:"id,omitempty"`
	// Sharing is of a Cache.
	// +optional
	Sharing CacheSharing `json:"sharing,omitempty"`
	// Stage has the files of a Bind; or filesHash names its uploaded archive.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Stage string `json:"stage,omitempty"`
	// FilesHash names the uploaded archive of a Bind.
	// +optional
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{64})?$`
	FilesHash string `json:"filesHash,omitempty"`
	// Source is the path of a Bind's file or directory, in the archive or the stage. Default: all.
	// +optional
	// +kubebuilder:validation:MaxLength=4096
	Source string `json:"source,omitempty"`
	// Owner is of a Cache or a Secret: a user's and a group's ID with ":" between them. Default 0:0.
	// +optional
	// +kubebuilder:validation:Pattern=`^([0-9]{1,10}:[0-9]{1,10})?$`
	Owner string `json:"owner,omitempty"`
	// Mode is octal, of a Cache, by default 0755, or of a Secret, by default 0400.
	// +optional
	// +kubebuilder:validation:Pattern=`^(0?[0-7]{3,4})?$`
	Mode string `json:"mode,omitempty"`
	// SizeBytes bounds a Tmpfs. Default: half of the sandbox's memory.
	// +optional
	// +kubebuilder:validation:Minimum=0
	SizeBytes int64 `json:"sizeBytes,omitempty"`
	// Env is a variable that has a Secret, in the place of a file.
	// +optional
	// +kubebuilder:validation:Pattern=`^([A-Za-z_][A-Za-z0-9_]{0,127})?$`
	Env string `json:"env,omitempty"`
	// Required fails the step if the build has no such Secret.
	// +optional
	Required bool `json:"required,omitempty"`
}

// BuildNetwork is what a Run reaches.
// +kubebuilder:validation:Enum=None
type BuildNetwork string

// NetworkNone leaves a Run its loopback alone.
const NetworkNone BuildNetwork = "None"

// BuildStep is one instruction.
// +kubebuilder:validation:XValidation:rule="self.type == 'Env' ? self.args.size() % 2 == 0 : self.args.size() <= (self.type == 'Copy' ? 4 : (self.type == 'Run' ? 2 : 1))",message="are too many for the type, or a name without a value",fieldPath=".args"
// +kubebuilder:validation:XValidation:rule="self.type != 'Copy' || self.args.size() >= 2",message="must be a source and a destination",fieldPath=".args"
// +kubebuilder:validation:XValidation:rule="(self.type == 'Copy' && !has(self.from)) == (has(self.filesHash) && self.filesHash.size() > 0)",message="is of a Copy, which needs it or from",fieldPath=".filesHash"
// +kubebuilder:validation:XValidation:rule="self.type == 'Copy' || !has(self.from)",message="is of a Copy",fieldPath=".from"
// +kubebuilder:validation:XValidation:rule="self.type == 'Run' || !has(self.mounts) || self.mounts.size() == 0",message="are of a Run",fieldPath=".mounts"
// +kubebuilder:validation:XValidation:rule="self.type == 'Run' || !has(self.network)",message="is of a Run",fieldPath=".network"
type BuildStep struct {
	Type BuildStepType `json:"type"`
	// Args depend on Type.
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	Args []string `json:"args"`
	// FilesHash names the uploaded archive of a Copy: 64 lower-case hex digits.
	// +optional
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{64})?$`
	FilesHash string `json:"filesHash,omitempty"`
	// From has the files of a Copy, in the place of uploaded ones. Without an owner in args they keep their own.
	// +optional
	From *StageFiles `json:"from,omitempty"`
	// Mounts are what a Run sees besides its files.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Mounts []BuildMount `json:"mounts,omitempty"`
	// Network None is that of a Run that reaches nothing.
	// +optional
	Network BuildNetwork `json:"network,omitempty"`
	// Force runs the step, and all after it, even if their results are kept.
	// +optional
	Force bool `json:"force,omitempty"`
}

// TemplateBuildSpec says how to make a template. It cannot change once from is set.
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.from) || self == oldSelf",message="cannot change once from is set"
// +kubebuilder:validation:XValidation:rule="self.templateName == oldSelf.templateName",message="is immutable",fieldPath=".templateName"
type TemplateBuildSpec struct {
	// TemplateName is the SandboxTemplate of this namespace that the build makes, or replaces if a build has made it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	TemplateName string `json:"templateName"`
	// Tags of the template get the result. Default: default alone.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:Pattern=`^[a-z0-9]([-_.a-z0-9]*[a-z0-9])?$`
	Tags []string `json:"tags,omitempty"`
	// From is what the build starts from. Unset: the build waits for it.
	// +optional
	From *BuildSource `json:"from,omitempty"`
	// Stages are built for the steps that take files of them. Each can take files of those before it.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Stages []BuildStage `json:"stages,omitempty"`
	// Steps are done in this order. The result of each is kept, and used again by builds in this namespace that begin
	// with the same steps.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	Steps []BuildStep `json:"steps,omitempty"`
	// StartCommand is run in a shell after the last step, and runs in every sandbox of the template.
	// +optional
	StartCommand string `json:"startCommand,omitempty"`
	// ReadyCommand is run in a shell until it succeeds. Then the sandbox's memory is kept, from which the template's
	// sandboxes start. Without it the build waits 20 seconds for StartCommand.
	// +optional
	ReadyCommand string `json:"readyCommand,omitempty"`
	// Force runs all steps.
	// +optional
	Force bool `json:"force,omitempty"`
	// CPU is the limit of the template's sandboxes. Unset: that of the template of from, or the server's default.
	// +optional
	CPU *resource.Quantity `json:"cpu,omitempty"`
	// Memory is the limit of the template's sandboxes, likewise.
	// +optional
	Memory *resource.Quantity `json:"memory,omitempty"`
}

// TemplateBuildStatus is what the build's controller last did.
type TemplateBuildStatus struct {
	// Phase is a summary: Pending, Building, Ready or Failed.
	// +optional
	Phase TemplateBuildPhase `json:"phase,omitempty"`
	// Conditions has one, Ready. Its message names why a build waits or failed.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Step is the number of the step that is done now, from 1; of an ended build, of the last one that was done.
	// +optional
	Step int32 `json:"step,omitempty"`
	// CachedSteps is how many steps were not done, since their result was kept.
	// +optional
	CachedSteps int32 `json:"cachedSteps,omitempty"`
	// FailedStep is the number of the step that failed, after "STAGE/" if it is a stage's, or base for the start of from, or
	// finalize for the end.
	// +optional
	FailedStep string `json:"failedStep,omitempty"`
	// Log has the last lines of the build's log, each after its step: at most 20, of 400 bytes. While a step or the start command runs,
	// new ones appear after two seconds.
	// +optional
	// +listType=atomic
	Log []string `json:"log,omitempty"`
	// TemplateID is the template's ID in the E2B API.
	// +optional
	TemplateID string `json:"templateID,omitempty"`
	// CheckpointName is the Checkpoint that the template's sandboxes start from; empty if it has no step of its own.
	// +optional
	CheckpointName string `json:"checkpointName,omitempty"`
	// StartedAt is when the build left Pending.
	// +optional
	StartedAt *metav1.Time `json:"startedAt,omitempty"`
	// CompletedAt is when it ended.
	// +optional
	CompletedAt *metav1.Time `json:"completedAt,omitempty"`
}

// TemplateBuild makes a template by steps. Deleting it cancels it.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=tbuild
// +kubebuilder:printcolumn:name="Template",type=string,JSONPath=`.spec.templateName`
// +kubebuilder:printcolumn:name="Tags",type=string,JSONPath=`.spec.tags`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Step",type=integer,JSONPath=`.status.step`
// +kubebuilder:printcolumn:name="Cached",type=integer,JSONPath=`.status.cachedSteps`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type TemplateBuild struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              TemplateBuildSpec `json:"spec"`
	// +optional
	Status TemplateBuildStatus `json:"status,omitempty"`
}

// Ended reports whether the build has succeeded or failed.
func (b *TemplateBuild) Ended() bool {
	return b.Status.Phase == BuildReady || b.Status.Phase == BuildFailed
}

// TemplateBuildList is a list of builds.
// +kubebuilder:object:root=true
type TemplateBuildList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []TemplateBuild `json:"items"`
}

// CredentialsName returns the name of the Secret with the credentials that a client of the REST API sent for a build. It is gone
// when the build has ended, or with its object.
func CredentialsName(build string) string { return build + "-registry" }
