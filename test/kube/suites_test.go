package kube

import (
	"os"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/controllers/checkpoint"
	"github.com/barchan-dev/barchan/internal/control/controllers/claim"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmpool"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmup"
	"github.com/barchan-dev/barchan/internal/testkit/checkpointsuite"
	"github.com/barchan-dev/barchan/internal/testkit/claimsuite"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/poolsuite"
	"github.com/barchan-dev/barchan/internal/testkit/running"
)

// startWithControllers returns how an administrator reaches an API server that has our CRDs. Where make test-kube has built them,
// Kubernetes' controllers run beside it, with the garbage collector.
func startWithControllers(t *testing.T) (cfg *rest.Config, controllers bool) {
	t.Helper()
	if os.Getenv("TEST_PART") != "kube" {
		return startKube(t), false
	}
	return kubecluster.Start(t, kubecluster.Config{Install: func(cfg *rest.Config) { install(t, cfg) }}).REST, true
}

// TestPools: the controller of pools does on Kubernetes what it does on the embedded server.
func TestPools(t *testing.T) {
	cfg, controllers := startWithControllers(t)
	poolsuite.Run(t, poolsuite.Config{REST: cfg, Start: startPools, Collects: controllers})
}

// startPools runs a cache and the controller of pools.
func startPools(t *testing.T, cfg *rest.Config, tuning poolsuite.Tuning) (stop func()) {
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

// TestCheckpoints: the controllers of checkpoints and warm-ups do on Kubernetes what they do on the
// embedded server.
func TestCheckpoints(t *testing.T) {
	cfg, _ := startWithControllers(t)
	checkpointsuite.Run(t, checkpointsuite.Config{
		REST: cfg, Start: func(t *testing.T, node *checkpointsuite.Node, tuning checkpointsuite.Tuning) func() {
			return startCheckpoints(t, cfg, node, tuning)
		},
		StartSandboxes: func(t *testing.T, machine *checkpointsuite.Machine, forkSecrets bool) func() {
			return startSandboxes(t, cfg, machine, forkSecrets)
		},
	})
}

// startCheckpoints runs a cache, and the controllers of checkpoints, warm-ups and pools.
func startCheckpoints(t *testing.T, cfg *rest.Config, node *checkpointsuite.Node, tuning checkpointsuite.Tuning) (stop func()) {
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

// startSandboxes runs a cache and the controller of sandboxes.
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

// TestClaims: the controller of claims does on Kubernetes what it does on the embedded server.
func TestClaims(t *testing.T) {
	cfg, controllers := startWithControllers(t)
	runClaims(t, cfg, controllers)
}

func runClaims(t *testing.T, cfg *rest.Config, controllers bool) {
	t.Helper()
	claimsuite.Run(t, claimsuite.Config{
		REST: cfg, NoCollector: !controllers,
		New: func(p claimsuite.Parts) (claimsuite.Starter, error) {
			cfg := claim.Config{Client: p.Client, Watched: p.Cache.Informers(), Cache: p.Cache, Picker: p.Picker, Quota: p.Quota, Assumed: p.Assumed, Events: p.Events, UpstreamMetrics: p.Upstream, Annotate: p.Annotate, Patience: p.Patience}
			if p.Binder != nil {
				cfg.Binder = p.Binder
			}
			return claim.New(cfg)
		},
	})
}
