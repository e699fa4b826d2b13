package checkpointsuite

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Machine runs sandboxes as a node does, in memory: each sandbox runs at once.
type Machine struct {
	mu     sync.Mutex
	states map[types.UID]sandbox.ContainerState // +checklocks:mu
	starts map[types.UID]int                    // +checklocks:mu
}

// NewMachine returns a machine that runs nothing.
func NewMachine() *Machine {
	return &Machine{states: map[types.UID]sandbox.ContainerState{}, starts: map[types.UID]int{}}
}

func (m *Machine) become(uid types.UID, state sandbox.ContainerState) sandbox.Observed {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.states[uid] = state
	return m.seenLocked(uid)
}

// +checklocks:m.mu
func (m *Machine) seenLocked(uid types.UID) sandbox.Observed {
	state, there := m.states[uid]
	if !there {
		return sandbox.Observed{State: sandbox.ContainerAbsent}
	}
	return sandbox.Observed{
		State: state, Node: "n1", Runtime: agents.RuntimeGVisor, Probed: true, StartedAt: time.Unix(1000, 0), Address: netip.MustParseAddr("10.9.0.2"),
	}
}

// Ensure starts a sandbox.
func (m *Machine) Ensure(_ context.Context, s *agents.Sandbox) (sandbox.Observed, error) {
	m.mu.Lock()
	m.starts[s.UID]++
	m.mu.Unlock()
	return m.become(s.UID, sandbox.ContainerRunning), nil
}

// Bind does nothing.
func (m *Machine) Bind(context.Context, *agents.Sandbox) error { return nil }

// SetEgress does nothing.
func (m *Machine) SetEgress(context.Context, *agents.Sandbox) error { return nil }

// Suspend freezes a sandbox in any mode.
func (m *Machine) Suspend(_ context.Context, ref sandbox.Ref, _ agents.SuspendMode) (sandbox.Observed, error) {
	return m.become(ref.UID, sandbox.ContainerPaused), nil
}

// Resume thaws a sandbox.
func (m *Machine) Resume(_ context.Context, ref sandbox.Ref, _ bool) (sandbox.Observed, error) {
	return m.become(ref.UID, sandbox.ContainerRunning), nil
}

// Remove forgets a sandbox.
func (m *Machine) Remove(_ context.Context, ref sandbox.Ref) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.states, ref.UID)
	return nil
}

// ObjectDeleted does nothing.
func (m *Machine) ObjectDeleted(string, string) {}

// Observe returns the state of a sandbox.
func (m *Machine) Observe(_ context.Context, ref sandbox.Ref) (sandbox.Observed, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seenLocked(ref.UID), nil
}

// startsOf returns how often a sandbox was started.
func (m *Machine) startsOf(s *agents.Sandbox) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.starts[s.UID]
}
