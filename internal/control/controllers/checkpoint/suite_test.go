package checkpoint_test

import (
	"testing"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/controllers/checkpoint"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmpool"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmup"
	"github.com/barchan-dev/barchan/internal/testkit/checkpointsuite"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
	"github.com/barchan-dev/barchan/internal/testkit/running"
)

// start runs the controllers over a cache of their own.
func start(t *testing.T, cfg *rest.Config, node *checkpointsuite.Node, tuning checkpointsuite.Tuning) (stop func()) {
	t.Helper()
	c, err := cache.New(t.Context(), cache.Config{REST: cfg})
	if err != nil {
		t.Fatal(err)
	}
	checkpoints, err := checkpoint.New(checkpoint.Config{
		Log: telemetry.Discard(), Client: c.Live(), Cache: c.Informers(), Objects: c, Runner: node, Node: "n1",
		SweepEvery: tuning.SweepEvery, ImportPatience: tuning.ImportPatience,
	})
	if err != nil {
		t.Fatal(err)
	}
	warmups, err := warmup.New(warmup.Config{Log: telemetry.Discard(), Client: c.Live(), Cache: c.Informers(), Objects: c})
	if err != nil {
		t.Fatal(err)
	}
	pools, err := warmpool.New(warmpool.Config{
		Log: telemetry.Discard(), Client: c.Live(), Cache: c.Informers(), Objects: c, WarmUps: c, ColdAfter: tuning.ColdAfter,
	})
	if err != nil {
		t.Fatal(err)
	}
	return running.Over(t, c, checkpoints.Start, warmups.Start, pools.Start)
}

// startSandboxes runs the controller of sandboxes over a cache of its own.
func startSandboxes(t *testing.T, cfg *rest.Config, machine *checkpointsuite.Machine, forkSecrets bool) (stop func()) {
	t.Helper()
	c, err := cache.New(t.Context(), cache.Config{REST: cfg})
	if err != nil {
		t.Fatal(err)
	}
	sandboxes, err := controllers.NewSandbox(controllers.SandboxConfig{
		Log: telemetry.Discard(), Client: c.Live(), Cache: c.Informers(), Runner: machine, Node: "n1", Origins: c, ForkSecrets: forkSecrets,
	})
	if err != nil {
		t.Fatal(err)
	}
	return running.Over(t, c, sandboxes.Start)
}

// TestSuite runs the suite on the embedded API server.
func TestSuite(t *testing.T) {
	api := embedded.APIServer(t)
	cfg := api.RESTConfig(apiserver.UserController)
	checkpointsuite.Run(t, checkpointsuite.Config{
		REST: cfg, Start: func(t *testing.T, node *checkpointsuite.Node, tuning checkpointsuite.Tuning) func() {
			return start(t, cfg, node, tuning)
		},
		StartSandboxes: func(t *testing.T, machine *checkpointsuite.Machine, forkSecrets bool) func() {
			return startSandboxes(t, cfg, machine, forkSecrets)
		},
	})
}
