package manager

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// lagging is a cache that has no sandbox yet. It counts reads of the API server, which does not answer while away is true.
type lagging struct {
	Cache
	reads *atomic.Int64
	away  *atomic.Bool
}

func (lagging) SandboxByID(context.Context, sandbox.ID) (*agents.Sandbox, error) {
	return nil, errs.ErrNotFound
}

func (c lagging) CurrentSandbox(ctx context.Context, namespace string, id sandbox.ID) (*agents.Sandbox, error) {
	c.reads.Add(1)
	if c.away.Load() {
		return nil, errs.ErrUnavailable
	}
	return c.Cache.CurrentSandbox(ctx, namespace, id)
}

// lagging returns a replica whose cache has no sandbox, and its cache and routes.
func (f fixture) lagging(t *testing.T) (*Manager, lagging, *route.Table) {
	t.Helper()
	c, routes := lagging{f.cluster, &atomic.Int64{}, &atomic.Bool{}}, route.NewTable()
	return f.replica(t, func(cfg *Config) { cfg.Cache, cfg.Routes = c, routes }), c, routes
}

// TestWhatAnotherReplicaMade finds a sandbox that the cache of a manager does not have, by its route or in the API server, and does not
// call it missing while that does not answer.
func TestWhatAnotherReplicaMade(t *testing.T) {
	for _, pushed := range []bool{true, false} {
		t.Run(map[bool]string{true: "with a route", false: "without"}[pushed], func(t *testing.T) {
			f := newFixture(t)
			made := f.mustCreate(t, request("base"))
			id := string(made.ID)
			other, c, routes := f.lagging(t)
			if pushed {
				known, ok := f.routes.Lookup(made.ID)
				if !ok {
					t.Fatal("the replica that made it has no route")
				}
				routes.Upsert(known.Route)
			} else {
				c.away.Store(true)
				if err := other.Sandboxes.Kill(t.Context(), team, id); !errors.Is(err, errs.ErrUnavailable) || errors.Is(err, errs.ErrNotFound) {
					t.Errorf("without an API server: %v", err)
				}
				c.away.Store(false)
			}
			if got, err := other.Sandboxes.Get(t.Context(), team, id); err != nil || got.ID != made.ID {
				t.Errorf("Get = %v, %v", got.ID, err)
			}
			if pushed && c.reads.Load() > 0 {
				t.Error("the sandbox of a route was looked for")
			}
			if _, err := other.Sandboxes.Get(t.Context(), "team-b", id); !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("by another tenant: %v", err)
			}
			if err := other.Sandboxes.Kill(t.Context(), team, id); err != nil {
				t.Errorf("Kill = %v", err)
			}
			reads := c.reads.Load()
			if _, err := other.Sandboxes.Get(t.Context(), team, id); !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("after the kill: %v", err)
			}
			if c.reads.Load() != reads {
				t.Error("a sandbox that has ended was looked for")
			}
		})
	}
}

// unreachable fails the reads of objects.
type unreachable struct {
	sandboxes.Objects
	away *atomic.Bool
}

func (o unreachable) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	if o.away.Load() {
		return errors.New("connection refused")
	}
	return o.Objects.Get(ctx, key, obj, opts...)
}

// TestWhatAnotherReplicaClaimed: where the watch of a replica is behind, the cache has an unclaimed member. To its owner the sandbox was
// missing, which a kill then left running.
func TestWhatAnotherReplicaClaimed(t *testing.T) {
	f := newFixture(t)
	old, away := &atomic.Pointer[agents.Sandbox]{}, &atomic.Bool{}
	old.Store(&f.cluster.Fill(t, team, "sized", 1)[0])
	other := f.replica(t, func(c *Config) {
		c.Cache, c.Routes, c.Objects = stale{f.cluster, old}, route.NewTable(), unreachable{c.Objects, away}
	})
	id := string(sandbox.IDOf(old.Load().UID))
	if _, err := other.Sandboxes.Get(t.Context(), team, id); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("before the claim: %v", err)
	}
	if v := f.mustCreate(t, request("sized")); string(v.ID) != id {
		t.Fatalf("got %s, want the member %s", v.ID, id)
	}
	away.Store(true)
	if err := other.Sandboxes.Kill(t.Context(), team, id); err == nil || errors.Is(err, errs.ErrNotFound) {
		t.Errorf("without an API server: %v", err)
	}
	away.Store(false)
	if _, err := other.Sandboxes.Get(t.Context(), "team-b", id); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("by another tenant: %v", err)
	}
	if err := other.Sandboxes.Kill(t.Context(), team, id); err != nil {
		t.Errorf("Kill = %v", err)
	}
}
