package checkpointsuite

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Node keeps the data of checkpoints as a node does, in memory.
type Node struct {
	mu       sync.Mutex
	kept     map[types.UID]sandbox.Captured // +checklocks:mu
	requests []sandbox.Capture              // every Capture; +checklocks:mu
	fails    []error                        // the answers of the next Captures; +checklocks:mu
	class    string                         // of all sandboxes; +checklocks:mu
	gate     chan struct{}                  // closed while captures may continue; +checklocks:mu
	inside   int                            // captures that wait at the gate; +checklocks:mu
	ring     func()                         // called when anything changes
}

// NewNode returns a node that has nothing.
func NewNode() *Node {
	n := &Node{kept: map[types.UID]sandbox.Captured{}, class: agents.RuntimeGVisor, gate: make(chan struct{}), ring: func() {}}
	close(n.gate)
	return n
}

// Capture keeps something, unless it is to fail.
func (n *Node) Capture(ctx context.Context, c sandbox.Capture) (sandbox.Captured, error) {
	n.mu.Lock()
	n.requests = append(n.requests, c)
	gate := n.gate
	n.inside++
	n.mu.Unlock()
	n.ring()
	var late error
	select {
	case <-gate:
	case <-ctx.Done():
		late = fmt.Errorf("capture: %w: %w", errs.ErrUnavailable, ctx.Err())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.inside--
	if late != nil {
		return sandbox.Captured{}, late
	}
	if got, ok := n.kept[c.Checkpoint.UID]; ok {
		return got, nil
	}
	if len(n.fails) > 0 {
		err := n.fails[0]
		n.fails = n.fails[1:]
		if err != nil {
			return sandbox.Captured{}, err
		}
	}
	return n.keepLocked(c), nil
}

// +checklocks:n.mu
func (n *Node) keepLocked(c sandbox.Capture) sandbox.Captured {
	got := sandbox.Captured{
		Checkpoint: c.Checkpoint, FilesSize: 1 << 20, Runtime: n.class, Image: "sha256:image", Node: "n1", Created: time.Now(),
	}
	if !c.FilesOnly && n.class != agents.RuntimeRunc {
		got.Memory, got.MemorySize, got.Digest = true, 2<<20, "sha256:memory"
		got.RuntimeBuild, got.CPUFeatures = "release-1 sha256:abc", []string{"avx"}
	}
	n.kept[c.Checkpoint.UID] = got
	return got
}

// Captured returns the stored data.
func (n *Node) Captured(_ context.Context, ref sandbox.CheckpointRef) (sandbox.Captured, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	got, ok := n.kept[ref.UID]
	if !ok {
		return got, fmt.Errorf("checkpoint %s: %w", ref.Name, errs.ErrNotFound)
	}
	return got, nil
}

// DropCheckpoint forgets.
func (n *Node) DropCheckpoint(_ context.Context, ref sandbox.CheckpointRef) error {
	defer n.ring()
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.kept, ref.UID)
	return nil
}

// Checkpoints lists what is kept.
func (n *Node) Checkpoints(context.Context) (all []sandbox.Captured, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.kept {
		all = append(all, c)
	}
	return all, nil
}

// put stores data without a capture.
func (n *Node) put(ref sandbox.CheckpointRef) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.keepLocked(sandbox.Capture{Checkpoint: ref})
}

// lose has data vanish.
func (n *Node) lose(uid types.UID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.kept, uid)
}

func (n *Node) has(uid types.UID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ok := n.kept[uid]
	return ok
}

// fail gives the answers of the next captures.
func (n *Node) fail(with ...error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fails = with
}

func (n *Node) setClass(class string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.class = class
}

// hold has captures wait, until hold(false).
func (n *Node) hold(held bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if held {
		n.gate = make(chan struct{})
		return
	}
	close(n.gate)
}

func (n *Node) waiting() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.inside
}

// captures are the requests for a checkpoint.
func (n *Node) captures(checkpoint types.UID) (all []sandbox.Capture) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.requests {
		if c.Checkpoint.UID == checkpoint {
			all = append(all, c)
		}
	}
	return all
}
