package controllers

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// Work is what a controller is made of, each of this package and those below it.
type Work struct {
	// Name in errors and metrics.
	Name string
	Log  *slog.Logger
	// Workers is how many objects are worked on at once.
	Workers    int
	Reconciler reconcile.Reconciler
	// RetryFirst and RetryMost bound the pauses after failures, which double.
	RetryFirst, RetryMost time.Duration
	Sources               []source.Source
}

// New returns a controller that no manager runs: its Start blocks until its context is done.
// Several servers may run in one process, as in tests.
func New(w Work) (controller.Controller, error) {
	unique := true
	c, err := controller.NewUnmanaged(w.Name, controller.Options{
		MaxConcurrentReconciles: w.Workers,
		SkipNameValidation:      &unique,
		Reconciler:              w.Reconciler,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](w.RetryFirst, w.RetryMost),
		LogConstructor:          func(*reconcile.Request) logr.Logger { return logr.FromSlogHandler(w.Log.Handler()) },
	})
	if err != nil {
		return nil, fmt.Errorf("make the %s controller: %w", w.Name, err)
	}
	for _, s := range w.Sources {
		if err := c.Watch(s); err != nil {
			return nil, fmt.Errorf("watch for the %s controller: %w", w.Name, err)
		}
	}
	return c, nil
}
