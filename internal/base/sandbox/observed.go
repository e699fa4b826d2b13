package sandbox

import (
	"cmp"
	"fmt"
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
	// Sidecars are the states of the sandbox's other containers; nil without any. What it points to never changes.
	Sidecars *Sidecars
	// Operations are the operations of this process on the sandbox; nil: none yet. What it points to never changes.
	Operations *Operations
	// Memory is where the memory of a paused sandbox is; empty without saved memory.
	Memory agents.MemoryPlace
	// MemorySize is the size in bytes of memory on disk; 0 for any other.
	MemorySize int64
	// Message is the reason if State is pending or exited or Probed false, what a paused sandbox has saved, and
	// what a cluster says of a Pod that is ready.
	Message string
	// Reason is that of the condition Ready, or of a sandbox that is to be suspended, Suspended, while State is
	// pending. Empty: DependenciesNotReady, NotSuspended.
	Reason string
	// Progressing means that State is pending and only time is missing: the Pod starts without trouble.
	Progressing bool
	// PodScheduled is that condition of a Pod; nil without one.
	PodScheduled *corev1.PodCondition
	// Service and ServiceFQDN name the Service of a sandbox in a cluster.
	Service, ServiceFQDN string
}

// Sidecars are the states of a sandbox's containers besides the first.
type Sidecars []agents.ContainerStatus

// Unready returns which container is not ready and why; empty: all are. failed means that its program has ended, and is
// not merely starting.
func (s *Sidecars) Unready() (why string, failed bool) {
	if s == nil {
		return "", false
	}
	for _, c := range *s {
		switch {
		case c.Ready:
		case c.State.Waiting != nil && (c.State.Waiting.Reason == ReasonCrashLoop || c.State.Waiting.Reason == ReasonUnknown):
			return fmt.Sprintf("container %s: %s", c.Name, c.State.Waiting.Message), true
		case c.State.Terminated != nil:
			return fmt.Sprintf("container %s has ended with code %d", c.Name, c.State.Terminated.ExitCode), true
		case c.State.Waiting != nil:
			why = fmt.Sprintf("container %s: %s", c.Name, cmp.Or(c.State.Waiting.Message, c.State.Waiting.Reason))
		default:
			why = fmt.Sprintf("container %s: its probes have not succeeded yet", c.Name)
		}
	}
	return why, false
}

// ReasonCrashLoop is kubelet's reason of a container that waits for its next start.
const ReasonCrashLoop = "CrashLoopBackOff"

// ReasonUnknown is kubelet's reason of a container whose state cannot be read: here, its agent does not answer.
const ReasonUnknown = "ContainerStatusUnknown"

// ReasonContainers is the reason of condition Ready of a sandbox whose first container runs, and another one's program has
// failed. Kubernetes has the same.
const ReasonContainers = "ContainersNotReady"
