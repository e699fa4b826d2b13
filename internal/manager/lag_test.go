package manager

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/errs"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

// stale is a cache whose watch of one sandbox lags: it returns an old copy until the API server is read
// through it, or a wait begins. Waits see what there is.
type stale struct {
	Cache
	copy *atomic.Pointer[agents.Sandbox]
}

func (c stale) SandboxByID(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error) {
	if old := c.copy.Load(); old != nil && sandbox.IDOf(old.UID) == id {
		return old.DeepCopy(), nil
	}
	return c.Cache.SandboxByID(ctx, id)
}

// behind returns a replica that has the sandbox in its cache as it is now, whatever is written later.
func (f fixture) behind(t *testing.T, v Sandbox) *Manager {
	t.Helper()
	old := &atomic.Pointer[agents.Sandbox]{}
	old.Store(f.object(t, v))
	return f.replica(t, func(c *Config) { c.Cache = stale{f.cluster, old} })
}

// TestNothingToDoIsDecidedLive: a replica whose cache lags behind another's write neither answers "done
// already" nor refuses by what its cache has.
func TestNothingToDoIsDecidedLive(t *testing.T) {
	ctx := t.Context()
	pause := func(f fixture, v Sandbox) error { return f.Pause(ctx, team, string(v.ID), nil) }
	for name, give := range map[string]struct {
		before, between func(fixture, Sandbox) error
		do              func(*Manager, string) error
		kind            error
		state           State
		left            time.Duration
	}{
		"connect after a shorter timeout": {
			between: func(f fixture, v Sandbox) error { return f.SetTimeout(ctx, team, string(v.ID), 10*time.Second) },
			do:      func(m *Manager, id string) error { return second2(m.Connect(ctx, team, id, 30*time.Minute, nil)) },
			state:   StateRunning, left: 30 * time.Minute,
		},
		"refresh after a shorter timeout": {
			between: func(f fixture, v Sandbox) error { return f.SetTimeout(ctx, team, string(v.ID), 10*time.Second) },
			do:      func(m *Manager, id string) error { return m.Refresh(ctx, team, id, 30*time.Minute) },
			state:   StateRunning, left: 30 * time.Minute,
		},
		"connect after a pause": {
			between: pause,
			do:      func(m *Manager, id string) error { return second2(m.Connect(ctx, team, id, 30*time.Minute, nil)) },
			state:   StateRunning, left: 30 * time.Minute,
		},
		"resume after a pause": {
			between: pause,
			do:      func(m *Manager, id string) error { return second(m.Resume(ctx, team, id, 30*time.Minute, nil)) },
			state:   StateRunning, left: 30 * time.Minute,
		},
		"wake after a pause": {
			between: pause,
			do:      func(m *Manager, id string) error { return m.Wake(ctx, sandbox.ID(id)) },
			state:   StateRunning, left: time.Hour,
		},
		"pause after a resume": {
			before:  pause,
			between: func(f fixture, v Sandbox) error { return second(f.Resume(ctx, team, string(v.ID), time.Hour, nil)) },
			do:      func(m *Manager, id string) error { return m.Pause(ctx, team, id, nil) },
			state:   StatePaused,
		},
		"timeout after a resume": {
			before:  pause,
			between: func(f fixture, v Sandbox) error { return second(f.Resume(ctx, team, string(v.ID), time.Hour, nil)) },
			do:      func(m *Manager, id string) error { return m.SetTimeout(ctx, team, id, 2*time.Hour) },
			state:   StateRunning, left: 2 * time.Hour,
		},
		"resume after a resume": {
			before:  pause,
			between: func(f fixture, v Sandbox) error { return second(f.Resume(ctx, team, string(v.ID), time.Hour, nil)) },
			do:      func(m *Manager, id string) error { return second(m.Resume(ctx, team, id, 2*time.Hour, nil)) },
			kind:    errs.ErrConflict, state: StateRunning, left: time.Hour,
		},
		"fork after a resume": {
			before:  pause,
			between: func(f fixture, v Sandbox) error { return second(f.Resume(ctx, team, string(v.ID), time.Hour, nil)) },
			do: func(m *Manager, id string) error {
				return second(m.Fork(ctx, ForkRequest{Namespace: team, ID: id, Count: 1, Timeout: time.Hour}))
			},
			state: StateRunning, left: time.Hour,
		},
		"network after a shorter timeout": {
			between: func(f fixture, v Sandbox) error { return f.SetTimeout(ctx, team, string(v.ID), 10*time.Minute) },
			do: func(m *Manager, id string) error {
				return m.SetNetwork(ctx, team, id, &agents.EgressPolicy{DenyOut: []string{"1.1.1.1"}})
			},
			state: StateRunning, left: 10 * time.Minute,
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			req := request("base")
			req.AutoResume = true
			v := f.mustCreate(t, req)
			if give.before != nil {
				if err := give.before(f, v); err != nil {
					t.Fatal(err)
				}
			}
			other := f.behind(t, v)
			if err := give.between(f, v); err != nil {
				t.Fatal(err)
			}
			if err := give.do(other, string(v.ID)); give.kind == nil && err != nil {
				t.Fatal(err)
			} else if give.kind != nil {
				wantKind(t, err, give.kind, "")
			}
			got, err := f.Get(ctx, team, string(v.ID))
			if err != nil || got.State != give.state {
				t.Fatalf("it is %s, %v; want %s", got.State, err, give.state)
			}
			if left := time.Until(got.EndAt).Round(time.Minute); give.state == StateRunning && left != give.left {
				t.Errorf("it ends in %s, want %s", left, give.left)
			}
		})
	}
}
