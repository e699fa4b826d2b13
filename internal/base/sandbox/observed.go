package sandbox

import (
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// Ref names a sandbox for the parts that run it.
type Ref struct {
	Namespace, Name string
	UID             types.UID
}

// ContainerState is what a node sees of a sandbox's container.
type ContainerState string

// Container states.
const (
	ContainerAbsent  ContainerState = "absent"  // nothing of it is on this node
	ContainerRunning ContainerState = "running" // its agent answers
	ContainerPaused  ContainerState = "paused"  // it sleeps, and can be resumed
	ContainerExited  ContainerState = "exited"  // it ended by itself or was killed
)

// Observed is what a node last saw of one sandbox.
type Observed struct {
	State ContainerState
	// Address of the sandbox; invalid where it has none.
	Address netip.Addr
	// Node is the name of the machine.
	Node string
	// Runtime is the class that runs it: gvisor or runc.
	Runtime string
	// Image is the digest that it runs.
	Image string
	// StartedAt is when it last began to run: at its start, or at a resume.
	StartedAt time.Time
	// Probed is false while a readiness probe of the template fails.
	Probed bool
	// EntrypointExit is the exit code of the template's entrypoint once that has ended.
	EntrypointExit *int32
	// Memory is where the memory is of what is paused and keeps it; else empty.
	Memory agents.MemoryPlace
	// Message says why, where State is exited or Probed false, and what is kept of what is paused.
	Message string
}
