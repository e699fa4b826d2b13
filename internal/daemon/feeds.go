package daemon

import (
	"context"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/cache"
)

// routesEvery is how often the routes learn how far the watch has come without events.
const routesEvery = 5 * time.Second

// observeRoute has the routes follow the watch, whose events are in order.
func (d *Daemon) observeRoute(older, newer *agents.Sandbox) {
	if newer != nil {
		d.routes.Apply(newer)
		d.routes.Progress(newer.ResourceVersion)
		return
	}
	d.routes.ApplyDelete(older)
	d.routes.Progress(older.ResourceVersion)
}

// followWatch tells the routes of the watch's bookmarks, and has them sweep what has had its time. A
// version is told a turn later, for the events before it may still be on their way.
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
