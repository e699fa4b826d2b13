package daemon

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/quota"
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

// feedQuotas passes the watches of what quotas count beside sandboxes to them until ctx is done. It is ready when they have received
// all that the first lists held.
func (d *Daemon) feedQuotas(ctx context.Context, ready func()) error {
	feeds := []func(context.Context, *Daemon) (<-chan struct{}, error){
		feedQuota[*extensions.SandboxTemplate], feedQuota[*barchan.Checkpoint], feedQuota[*barchan.APIKey],
	}
	if d.keepsWebhooks() {
		feeds = append(feeds, feedQuota[*corev1.Secret])
	}
	if d.cfg.Role == config.RoleServer {
		feeds = append(feeds, feedQuota[*barchan.TemplateBuild])
	}
	for _, feed := range feeds {
		synced, err := feed(ctx, d)
		if err != nil {
			return err
		}
		select {
		case <-synced:
		case <-ctx.Done():
			return fmt.Errorf("wait for the quotas: %w", context.Cause(ctx))
		}
	}
	ready()
	<-ctx.Done()
	return nil
}

// keepsWebhooks reports whether this process serves webhooks: a server and its replicas do, and none on a cluster.
func (d *Daemon) keepsWebhooks() bool {
	return d.cfg.Role == config.RoleServer || d.cfg.Role == config.RoleReplica && d.verifier == nil
}

func feedQuota[T interface {
	client.Object
	comparable
}](ctx context.Context, d *Daemon) (<-chan struct{}, error) {
	return cache.On(ctx, d.cache, quota.ObserveObjects[T](d.quotas))
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
