package warmpool_test

import (
	"context"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/apiserver"
	"github.com/barchan-dev/barchan/internal/cache"
	"github.com/barchan-dev/barchan/internal/controllers/warmpool"
	"github.com/barchan-dev/barchan/internal/telemetry"
	"github.com/barchan-dev/barchan/internal/testkit/poolsuite"
)

// serve returns a config for a real API server of its own.
func serve(t testing.TB) *rest.Config {
	t.Helper()
	api, err := apiserver.New(apiserver.Config{DataDir: t.TempDir(), Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	if err := api.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Stop)
	return api.RESTConfig(apiserver.UserController)
}

// start runs the controller over a cache of its own.
func start(t *testing.T, cfg *rest.Config, tuning poolsuite.Tuning) (stop func()) {
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
	if err := c.WaitSynced(t.Context()); err != nil {
		t.Fatal(err)
	}
	return func() {
		cancel()
		running.Wait()
	}
}

func TestPools(t *testing.T) {
	poolsuite.Run(t, poolsuite.Config{REST: serve(t), Start: start, Collects: true})
}
