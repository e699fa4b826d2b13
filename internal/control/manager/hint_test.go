package manager

import (
	"context"
	"errors"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// lagging is a cache that has no sandbox yet.
type lagging struct{ Cache }

func (lagging) SandboxByID(context.Context, sandbox.ID) (*agents.Sandbox, error) {
	return nil, errs.ErrNotFound
}

// TestWhatAnotherReplicaMade reads a sandbox that only the routes of a manager have.
func TestWhatAnotherReplicaMade(t *testing.T) {
	f := newFixture(t)
	made := f.mustCreate(t, request("base"))
	id := string(made.ID)
	routes := route.NewTable()
	other := f.replica(t, func(c *Config) { c.Cache, c.Routes = lagging{f.cluster}, routes })
	if _, err := other.Sandboxes.Get(t.Context(), team, id); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("without a route: %v", err)
	}
	known, ok := f.routes.Lookup(made.ID)
	if !ok {
		t.Fatal("the replica that made it has no route")
	}
	routes.Upsert(known.Route)
	if got, err := other.Sandboxes.Get(t.Context(), team, id); err != nil || got.ID != made.ID {
		t.Errorf("Get = %v, %v", got.ID, err)
	}
	if _, err := other.Sandboxes.Get(t.Context(), "team-b", id); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("by another tenant: %v", err)
	}
	if err := other.Sandboxes.Kill(t.Context(), team, id); err != nil {
		t.Errorf("Kill = %v", err)
	}
	if _, err := other.Sandboxes.Get(t.Context(), team, id); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("after the kill: %v", err)
	}
}
