package v1beta1

// Condition types of a Sandbox.
const (
	ConditionReady        = "Ready"
	ConditionSuspended    = "Suspended"
	ConditionPodScheduled = "PodScheduled"
	ConditionFinished     = "Finished"
)

// Reasons of the conditions Ready and Finished.
const (
	ReasonDependenciesReady    = "DependenciesReady"
	ReasonDependenciesNotReady = "DependenciesNotReady"
	ReasonSandboxSuspended     = "SandboxSuspended"
	ReasonPodSucceeded         = "PodSucceeded"
	ReasonPodFailed            = "PodFailed"
	ReasonSandboxExpired       = "SandboxExpired"
	ReasonMultiplePods         = "MultiplePods"
	ReasonReconcilerError      = "ReconcilerError"
)

// Reasons of the condition Suspended.
const (
	ReasonPodTerminated   = "PodTerminated"
	ReasonPodTerminating  = "PodTerminating"
	ReasonPodNotOwned     = "PodNotOwned"
	ReasonNotSuspended    = "NotSuspended"
	ReasonPodStateUnknown = "PodStateUnknown"
)

// Labels of upstream.
const (
	LabelSandboxNameHash  = "agents.x-k8s.io/sandbox-name-hash"
	LabelWarmPoolSandbox  = "agents.x-k8s.io/warm-pool-sandbox"
	LabelTemplateRefHash  = "agents.x-k8s.io/sandbox-template-ref-hash"
	LabelTemplateHash     = "agents.x-k8s.io/sandbox-template-hash"
	LabelClaimUID         = "agents.x-k8s.io/claim-uid"
	LabelLaunchType       = "agents.x-k8s.io/launch-type"
	LabelCreatedBy        = "agents.x-k8s.io/created-by"
	LaunchCold            = "cold"
	LaunchWarm            = "warm"
	AnnotationPodName     = "agents.x-k8s.io/pod-name"
	AnnotationTemplateRef = "agents.x-k8s.io/sandbox-template-ref"
	AnnotationSandboxName = "agents.x-k8s.io/sandbox-name"
	// AnnotationFirstObserved of a SandboxClaim is when a controller first saw it, in RFC 3339 with nanoseconds.
	AnnotationFirstObserved = "agents.x-k8s.io/controller-first-observed-at"
)

// AnnotationTransientVolumes of a Pod template names emptyDir volumes, with commas between them, that are no part of a
// sandbox's files: a checkpoint without memory leaves them out, and a sandbox that starts from one may have others.
const AnnotationTransientVolumes = "barchan.dev/transient-volumes"

// NodeFinalizer keeps a Sandbox object until its node confirmed that nothing of it is left.
const NodeFinalizer = "barchan.dev/node"

// Runtime classes of a node (spec.podTemplate.spec.runtimeClassName). The default is gVisor.
const (
	RuntimeGVisor = "gvisor"
	RuntimeRunc   = "runc"
)
