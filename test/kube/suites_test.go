package kube

import (
	"context"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/cache"
	"github.com/barchan-dev/barchan/internal/controllers/claim"
	"github.com/barchan-dev/barchan/internal/controllers/warmpool"
	"github.com/barchan-dev/barchan/internal/telemetry"
	"github.com/barchan-dev/barchan/internal/testkit/claimsuite"
	"github.com/barchan-dev/barchan/internal/testkit/poolsuite"
)

// TestPools: the controller of pools does on Kubernetes what it does on the embedded server.
func TestPools(t *testing.T) {
	cfg := startKube(t)
	install(t, cfg)
	poolsuite.Run(t, poolsuite.Config{REST: cfg, Start: startPools})
}

// startPools runs a cache and the controller of pools.
func startPools(t *testing.T, cfg *rest.Config, tuning poolsuite.Tuning) (stop func()) {
	t.Helper()
	c, err := cache.New(t.Context(), cache.Config{REST: cfg})
	if err != nil {
		t.Fatal(err)
	}
	controller, err := warmpool.New(warmpool.Config{
		Log: telemetry.Discard(), Client: c.Live(), Cache: c.Informers(), Objects: c, StuckAfter: tuning.StuckAfter,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{c.Run, controller.Start} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	stop = func() { cancel(); running.Wait() }
	if err := c.WaitSynced(t.Context()); err != nil {
		stop()
		t.Fatal(err)
	}
	return stop
}

// TestClaims: the controller of claims does on Kubernetes what it does on the embedded server.
func TestClaims(t *testing.T) {
	cfg := startKube(t)
	install(t, cfg)
	claimsuite.Run(t, claimsuite.Config{
		REST: cfg, NoCollector: true,
		New: func(p claimsuite.Parts) (claimsuite.Starter, error) {
			cfg := claim.Config{Client: p.Client, Watched: p.Cache.Informers(), Cache: p.Cache, Picker: p.Picker, Quota: p.Quota, Events: p.Events}
			if p.Binder != nil {
				cfg.Binder = p.Binder
			}
			return claim.New(cfg)
		},
	})
}
