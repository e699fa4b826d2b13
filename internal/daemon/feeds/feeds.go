// Package feeds passes the watches of objects to the tables that decide from memory: routes, pool members, quotas.
package feeds

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// progressInterval is the interval at which the routes receive the watch's version.
const progressInterval = 5 * time.Second

// Observer receives each change of a sandbox in the order of the watch; newer is nil for a deleted one, older for a new one.
type Observer func(older, newer *agents.Sandbox)

// Route returns the observer of a table of routes.
func Route(table *route.Table) Observer {
	return func(older, newer *agents.Sandbox) {
		if newer != nil {
			table.Apply(newer)
			table.Progress(newer.ResourceVersion)
			return
		}
		table.ApplyDelete(older)
		table.Progress(older.ResourceVersion)
	}
}

// Sandboxes feeds observers of sandboxes.
type Sandboxes struct {
	Cache  *cache.Cache
	Routes *route.Table
	// Observers are called in their order.
	Observers []Observer
	// TrustUntil bounds the trust in the routes until the watch has proved itself; zero: no bound.
	TrustUntil time.Time
}

// Run passes the watch of sandboxes to the observers until ctx is done. It is ready when each has received all that the
// first list held; only then are the routes complete.
func (s *Sandboxes) Run(ctx context.Context, ready func()) error {
	synced, err := cache.On(ctx, s.Cache, func(older, newer *agents.Sandbox) {
		for _, observe := range s.Observers {
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
	if !s.TrustUntil.IsZero() {
		s.Routes.TrustUntil(s.TrustUntil)
	}
	s.Routes.MarkSynced()
	ready()
	return s.followWatch(ctx)
}

// followWatch reports the watch's bookmarks to the routes, which also removes expired hints. A version is reported one interval
// later, because the events before it may not have been delivered yet.
func (s *Sandboxes) followWatch(ctx context.Context) error {
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for before := ""; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		s.Routes.Progress(before)
		var err error
		if before, err = cache.Passed[*agents.Sandbox](ctx, s.Cache); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// Quotas feeds quotas with what they count beside sandboxes.
type Quotas struct {
	Cache  *cache.Cache
	Quotas *quota.Quotas
	// ServerKinds has webhooks and builds counted, which a server alone serves.
	ServerKinds bool
}

// Run passes the watches to the quotas until ctx is done. It is ready when they have received all that the first lists held.
func (q *Quotas) Run(ctx context.Context, ready func()) error {
	feeds := []func(context.Context, *Quotas) (<-chan struct{}, error){
		feed[*extensions.SandboxTemplate], feed[*barchan.Checkpoint], feed[*barchan.APIKey],
	}
	if q.ServerKinds {
		feeds = append(feeds, feed[*corev1.Secret], feed[*barchan.TemplateBuild])
	}
	for _, feed := range feeds {
		synced, err := feed(ctx, q)
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

func feed[T interface {
	client.Object
	comparable
}](ctx context.Context, q *Quotas) (<-chan struct{}, error) {
	return cache.On(ctx, q.Cache, quota.ObserveObjects[T](q.Quotas))
}
