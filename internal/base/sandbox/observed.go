package sandbox

import (
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// Ref names a sandbox for the packages that run it.
type Ref struct {
	Namespace, Name string
	UID             types.UID
}

// ContainerState is the state of a sandbox's container on a node.
type ContainerState string

// Container states.
const (
	ContainerAbsent  ContainerState = "absent"  // no resources on this node
	ContainerPending ContainerState = "pending" // a cluster has yet to run or to end its Pod
	ContainerRunning ContainerState = "running" // its agent answers
	ContainerPaused  ContainerState = "paused"  // it can be resumed
	ContainerExited  ContainerState = "exited"  // it exited or was killed
)

// Observed is the last observed state of one sandbox on a node.
type Observed struct {
	State ContainerState
	// Address of the sandbox; invalid without one.
	Address netip.Addr
	// Node is the name of the machine.
	Node string
	// Runtime is the class that runs it: gvisor or runc.
	Runtime string
	// Image is the digest of its image.
	Image string
	// StartedAt is the time of its last start or resume.
	StartedAt time.Time
	// Probed is false while a readiness probe of the template fails.
	Probed bool
	// EntrypointExit is the exit code of the template's entrypoint once it has exited.
	EntrypointExit *int32
	// Memory is where the memory of a paused sandbox is; empty without saved memory.
	Memory agents.MemoryPlace
	// Message is the reason if State is pending or exited or Probed false, what a paused sandbox has saved, and
	// what a cluster says of a Pod that is ready.
	Message string
	// Reason is that of the condition Ready, or of a sandbox that is to be suspended, Suspended, while State is
	// pending. Empty: DependenciesNotReady, NotSuspended.
	Reason string
	// PodScheduled is that condition of a Pod; nil without one.
	PodScheduled *corev1.PodCondition
	// Service and ServiceFQDN name the Service of a sandbox in a cluster.
	Service, ServiceFQDN string
}
