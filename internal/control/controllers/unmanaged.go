package controllers

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// Work configures a controller of this package or a sub-package.
type Work struct {
	// Name appears in errors and metrics.
	Name string
	Log  *slog.Logger
	// Workers is the number of concurrent reconciles.
	Workers int
	// Share is how many of them one namespace may have at once while others have none, see Fits; zero: all. Agents, registries and
	// stores of a tenant answer as late as they like, and other tenants must not wait for them.
	Share      int
	Reconciler reconcile.Reconciler
	// RetryFirst and RetryMost bound the exponential backoff.
	RetryFirst, RetryMost time.Duration
	Sources               []source.Source
}

// Reserve is how many workers there are beyond the configured ones: the first of so many namespaces. One without work costs a goroutine,
// 4.5 KiB.
const Reserve = 64

// New returns a controller without a manager: its Start blocks until its context is done.
// Its name need not be unique, because tests run several servers in one process.
func New(w Work) (controller.Controller, error) {
	if w.Share > 0 {
		workers, share := w.Workers, w.Share
		fits := func(own, all int) bool { return Fits(own, all, workers, share) }
		limiter := newStartLimiter(fits, 0, func(key types.NamespacedName) string { return key.Namespace })
		w.Reconciler, w.Sources, w.Workers = shared{limiter, w.Reconciler}, append(w.Sources, limiter.source()), workers+Reserve
	}
	unique := true
	c, err := controller.NewUnmanaged(w.Name, controller.Options{
		MaxConcurrentReconciles: w.Workers,
		SkipNameValidation:      &unique,
		Reconciler:              w.Reconciler,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](w.RetryFirst, w.RetryMost),
		LogConstructor:          func(*reconcile.Request) logr.Logger { return logr.FromSlogHandler(w.Log.Handler()) },
	})
	if err != nil {
		return nil, fmt.Errorf("create %s controller: %w", w.Name, err)
	}
	for _, s := range w.Sources {
		if err := c.Watch(s); err != nil {
			return nil, fmt.Errorf("add watch to %s controller: %w", w.Name, err)
		}
	}
	return c, nil
}

// shared reconciles objects of namespaces that have a worker left.
type shared struct {
	limiter *startLimiter
	next    reconcile.Reconciler
}

// Reconcile implements reconcile.Reconciler.
func (s shared) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	if !s.limiter.acquire(req.NamespacedName) {
		return reconcile.Result{}, nil
	}
	defer s.limiter.release(req.NamespacedName)
	return s.next.Reconcile(ctx, req)
}
