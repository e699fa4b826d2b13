package daemon

import (
	"context"
	"fmt"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/daemon/staleness"
)

// routesEvery is the interval at which the routes receive the watch's version.
const routesEvery = 5 * time.Second

// observer receives each change of a sandbox in the order of the watch; newer is nil for a deleted one, older for a new one.
type observer func(older, newer *agents.Sandbox)

func (d *Daemon) observeRoute(older, newer *agents.Sandbox) {
	if newer != nil {
		d.routes.Apply(newer)
		d.routes.Progress(newer.ResourceVersion)
		return
	}
	d.routes.ApplyDelete(older)
	d.routes.Progress(older.ResourceVersion)
}

func (d *Daemon) observeDeletion(older, newer *agents.Sandbox) {
	if newer == nil && d.machine != nil {
		d.machine.Node.ObjectDeleted(older.Namespace, older.Name)
	}
}

// feedTables passes the watch of sandboxes to the observers until ctx is done. It is ready when each has received all that the
// first list held; only then are the routes complete.
func (d *Daemon) feedTables(ctx context.Context, ready func()) error {
	synced, err := cache.On(ctx, d.cache, func(older, newer *agents.Sandbox) {
		for _, observe := range d.observers {
			observe(older, newer)
		}
	})
	if err != nil {
		return err
	}
	select {
	case <-synced:
	case <-ctx.Done():
		return fmt.Errorf("wait for the routes: %w", context.Cause(ctx))
	}
	if d.watches != nil && d.verifier == nil {
		d.routes.TrustUntil(d.started.Add(d.stale))
	}
	d.routes.MarkSynced()
	ready()
	return d.followWatch(ctx)
}

// followWatch reports the watch's bookmarks to the routes, which also removes expired hints. A version is reported one interval
// later, because the events before it may not have been delivered yet.
func (d *Daemon) followWatch(ctx context.Context) error {
	tick := time.NewTicker(routesEvery)
	defer tick.Stop()
	for before := ""; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		d.routes.Progress(before)
		var err error
		if before, err = cache.Passed[*agents.Sandbox](ctx, d.cache); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// proveWatch extends the trust in a replica's routes as far as its watch proves. With a verifier they are trusted without.
func (d *Daemon) proveWatch(ctx context.Context) error {
	cfg := staleness.Config{
		Log: d.log, Stale: d.stale, Began: d.started, Live: d.cache.Live(), Watches: d.watches, Trust: d.routes.TrustUntil, Gate: d.health,
		Passed: func(ctx context.Context) (string, error) { return cache.Passed[*agents.Sandbox](ctx, d.cache) },
	}
	if d.verifier != nil {
		cfg.Trust = nil
	}
	return staleness.Run(ctx, cfg)
}
