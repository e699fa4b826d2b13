package manager

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
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

// behind returns a replica that has the sandbox in its cache as it is now, regardless of later writes.
func (f fixture) behind(t *testing.T, v sandboxes.Sandbox) *Manager {
	t.Helper()
	old := &atomic.Pointer[agents.Sandbox]{}
	old.Store(f.object(t, v))
	return f.replica(t, func(c *Config) { c.Cache = stale{f.cluster, old} })
}

// TestNothingToDoIsDecidedLive: a replica whose cache lags behind another's write neither answers "done
// already" nor refuses by what its cache has.
func TestNothingToDoIsDecidedLive(t *testing.T) {
	type op func(ctx context.Context, m *Manager, id string) error
	connect := func(ctx context.Context, m *Manager, id string) error {
		return second2(m.Sandboxes.Connect(ctx, team, id, 30*time.Minute, nil))
	}
	refresh := func(ctx context.Context, m *Manager, id string) error {
		return m.Sandboxes.Refresh(ctx, team, id, 30*time.Minute)
	}
	pause := func(ctx context.Context, m *Manager, id string) error { return m.Sandboxes.Pause(ctx, team, id, nil) }
	resume := func(ctx context.Context, m *Manager, id string) error {
		return second(m.Sandboxes.Resume(ctx, team, id, 30*time.Minute, nil))
	}
	wake := func(ctx context.Context, m *Manager, id string) error { return m.Sandboxes.Wake(ctx, sandbox.ID(id)) }
	timeout := func(d time.Duration) op {
		return func(ctx context.Context, m *Manager, id string) error {
			return m.Sandboxes.SetTimeout(ctx, team, id, d)
		}
	}
	fork := func(ctx context.Context, m *Manager, id string) error {
		return second(m.Creates.Fork(ctx, creating.ForkRequest{Namespace: team, ID: id, Count: 1, Timeout: time.Hour}))
	}
	network := func(ctx context.Context, m *Manager, id string) error {
		return m.Sandboxes.SetNetwork(ctx, team, id, &agents.EgressPolicy{DenyOut: []string{"1.1.1.1"}})
	}
	for name, give := range map[string]struct {
		before, between, do op // between is what the replica does not see
		kind                error
		state               sandboxes.State
		left                time.Duration
	}{
		"connect after a shorter timeout": {between: timeout(10 * time.Second), do: connect, state: sandboxes.StateRunning, left: 30 * time.Minute},
		"refresh after a shorter timeout": {between: timeout(10 * time.Second), do: refresh, state: sandboxes.StateRunning, left: 30 * time.Minute},
		"network after a shorter timeout": {between: timeout(10 * time.Minute), do: network, state: sandboxes.StateRunning, left: 10 * time.Minute},
		"connect after a pause":           {between: pause, do: connect, state: sandboxes.StateRunning, left: 30 * time.Minute},
		"resume after a pause":            {between: pause, do: resume, state: sandboxes.StateRunning, left: 30 * time.Minute},
		"wake after a pause":              {between: pause, do: wake, state: sandboxes.StateRunning, left: time.Hour},
		"pause after a pause":             {between: pause, do: pause, kind: errs.ErrConflict, state: sandboxes.StatePaused},
		"pause after a resume":            {before: pause, between: resume, do: pause, state: sandboxes.StatePaused},
		"timeout after a resume":          {before: pause, between: resume, do: timeout(2 * time.Hour), state: sandboxes.StateRunning, left: 2 * time.Hour},
		"resume after a resume":           {before: pause, between: resume, do: resume, kind: errs.ErrConflict, state: sandboxes.StateRunning, left: 30 * time.Minute},
		"fork after a resume":             {before: pause, between: resume, do: fork, state: sandboxes.StateRunning, left: 30 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			req := request("base")
			req.AutoResume = true
			v := f.mustCreate(t, req)
			id := string(v.ID)
			if give.before != nil {
				if err := give.before(t.Context(), f.Manager, id); err != nil {
					t.Fatal(err)
				}
			}
			other := f.behind(t, v)
			if err := give.between(t.Context(), f.Manager, id); err != nil {
				t.Fatal(err)
			}
			if err := give.do(t.Context(), other, id); !errors.Is(err, give.kind) {
				t.Fatalf("it is answered %v, want %v", err, give.kind)
			}
			got := f.mustGet(t, id)
			if left := time.Until(got.EndAt).Round(time.Minute); got.State != give.state || (give.state == sandboxes.StateRunning && left != give.left) {
				t.Errorf("it is %s and ends in %s, want %s and %s", got.State, left, give.state, give.left)
			}
		})
	}
}

// uncached is a cache whose watch has not delivered a template yet; reads of the API server return it.
type uncached struct {
	Cache
	name  string
	reads *atomic.Int64
}

func (c uncached) Template(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, error) {
	if key.Name == c.name {
		return nil, errs.ErrNotFound
	}
	return c.Cache.Template(ctx, key)
}

func (c uncached) Templates(ctx context.Context, namespace string) ([]extensions.SandboxTemplate, error) {
	all, err := c.Cache.Templates(ctx, namespace)
	return slices.DeleteFunc(all, func(t extensions.SandboxTemplate) bool { return t.Name == c.name }), err
}

func (c uncached) TemplatesNamed(ctx context.Context, namespace, name string) ([]extensions.SandboxTemplate, error) {
	all, err := c.Cache.TemplatesNamed(ctx, namespace, name)
	return slices.DeleteFunc(all, func(t extensions.SandboxTemplate) bool { return t.Name == c.name }), err
}

func (c uncached) CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error) {
	c.reads.Add(1)
	return c.Cache.CurrentTemplate(ctx, key)
}

// TestCreateReadsUncachedTemplates: a create finds a template that was applied just before. A name that no
// template has costs one read of the API server for each namespace; one in the cache costs none.
func TestCreateReadsUncachedTemplates(t *testing.T) {
	const ofClaim = 2 // reads of each claim
	for name, give := range map[string]struct {
		template, uncached string
		refused            bool
		reads              int64
	}{
		"own":             {template: "sized", uncached: "sized", reads: 1 + ofClaim},
		"own, qualified":  {template: team + "/sized", uncached: "sized", reads: 1 + ofClaim},
		"public":          {template: "base", uncached: "base", reads: 2 + ofClaim},
		"not public":      {template: "private", uncached: "private", refused: true, reads: 2},
		"of another team": {template: "team-b/secret", uncached: "secret", refused: true},
		"none":            {template: "none", refused: true, reads: 2},
		"no valid name":   {template: "No_Name", refused: true},
		"cached":          {template: "sized", reads: ofClaim},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			reads := &atomic.Int64{}
			m := f.replica(t, func(c *Config) { c.Cache = uncached{f.cluster, give.uncached, reads} })
			_, err := m.Creates.Create(t.Context(), request(give.template))
			want := ""
			if give.refused {
				want = "template '" + give.template + "' not found"
			}
			if message, _ := errs.PublicMessage(err); message != want || (err != nil) != give.refused {
				t.Fatalf("Create = %v, want %q", err, want)
			}
			if got := reads.Load(); got != give.reads {
				t.Errorf("%d reads of the API server, want %d", got, give.reads)
			}
		})
	}
}
