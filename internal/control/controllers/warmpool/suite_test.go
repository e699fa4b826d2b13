package warmpool_test

import (
	"testing"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmpool"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
	"github.com/barchan-dev/barchan/internal/testkit/poolsuite"
	"github.com/barchan-dev/barchan/internal/testkit/running"
)

// serve returns a config for a real API server of its own.
func serve(t testing.TB) *rest.Config {
	t.Helper()
	return embedded.APIServer(t).RESTConfig(apiserver.UserController)
}

// start runs the controller over a cache of its own.
func start(t *testing.T, cfg *rest.Config, tuning poolsuite.Tuning) (stop func()) {
	t.Helper()
	c, err := cache.New(t.Context(), cache.Config{REST: cfg})
	if err != nil {
		t.Fatal(err)
	}
	controller, err := warmpool.New(warmpool.Config{
		Log: telemetry.Discard(), Client: c.Live(), Cache: c.Informers(), Objects: c, StuckAfter: tuning.StuckAfter, GoneAfter: tuning.GoneAfter,
	})
	if err != nil {
		t.Fatal(err)
	}
	return running.Over(t, c, controller.Start)
}

func TestPools(t *testing.T) {
	poolsuite.Run(t, poolsuite.Config{REST: serve(t), Start: start, Collects: true})
}
