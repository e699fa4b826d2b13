package daemon

import (
	"context"
	"fmt"

	"k8s.io/client-go/tools/events"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/controllers/checkpoint"
	"github.com/barchan-dev/barchan/internal/control/controllers/claim"
	"github.com/barchan-dev/barchan/internal/control/controllers/history"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmpool"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmup"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// startFeeds has the watch fill what decides from memory (routes, ready members, quotas), and
// waits until each knows all there is.
func (d *Daemon) startFeeds(ctx context.Context, stack *lifecycle.Stack) (err error) {
	if d.picker, err = picker.New(picker.Config{
		Writer: d.objects, Log: d.cfg.Log, Metrics: d.metrics,
		Orphaned: func(s *agents.Sandbox) { d.manager.Orphaned(s) },
	}); err != nil {
		return err
	}
	if d.quotas, err = quota.New(quota.Config{Reader: d.cache, Log: d.cfg.Log, Defaults: d.quotaDefaults(), DefaultSize: quota.Size{
		MilliCPU: d.cfg.SandboxCPU.MilliValue(), Memory: d.cfg.SandboxMemory.Value(),
	}}); err != nil {
		return err
	}
	d.binder = manager.NewBinder(manager.BinderConfig{Tokens: d.tokens})
	if err := d.push(ctx, stack, "binder", d.binder.Run); err != nil {
		return err
	}
	synced, err := cache.On(ctx, d.cache, func(older, newer *agents.Sandbox) {
		d.observeRoute(older, newer)
		if newer == nil && d.machine != nil {
			d.machine.node.ObjectDeleted(older.Namespace, older.Name)
		}
		d.picker.Observe(older, newer)
		d.quotas.Observe(older, newer)
		d.binder.Observe(older, newer)
	})
	if err != nil {
		return err
	}
	select {
	case <-synced:
	case <-ctx.Done():
		return fmt.Errorf("wait for the routes: %w", context.Cause(ctx))
	}
	if d.watches != nil {
		d.routes.TrustUntil(d.started.Add(d.stale))
		if err := d.push(ctx, stack, "watch proof", d.proveWatch(d.started).run); err != nil {
			return err
		}
	}
	d.routes.MarkSynced()
	return d.push(ctx, stack, "routes", d.followWatch)
}

// quotaDefaults are those of the settings, in which zero means that there is none.
func (d *Daemon) quotaDefaults() quota.Limits {
	limit := func(n int64) quota.Limit { return quota.Limit{Set: n > 0, Most: n} }
	return quota.Limits{
		Sandboxes: limit(int64(d.cfg.QuotaSandboxes)), MilliCPU: limit(d.cfg.QuotaCPU.MilliValue()),
		Memory: limit(d.cfg.QuotaMemory.Value()), CountPaused: d.cfg.QuotaCounts == config.QuotaAll,
	}
}

// startManager makes what the APIs and the gateway ask.
func (d *Daemon) startManager(ctx context.Context, stack *lifecycle.Stack) (err error) {
	var diskUsed func(context.Context, sandbox.Ref) (int64, error)
	if d.machine != nil {
		diskUsed = d.machine.node.DiskUsed
	}
	d.manager, err = manager.New(manager.Config{
		Gate:    d.health,
		Objects: d.objects, Cache: d.cache, Picker: d.picker, Quota: d.quotas, Binder: d.binder,
		Routes: replicatedRoutes{d}, Witness: d.binder, Tokens: d.tokens, Log: d.cfg.Log, Metrics: d.metrics, MaxTimeout: d.cfg.MaxTimeout,
		ForkSecrets: d.cfg.ForkSecrets,
		DiskUsed:    diskUsed,
		DefaultSize: manager.Size{CPUs: int(d.cfg.SandboxCPU.Value()), MemoryMB: d.cfg.SandboxMemory.Value() >> 20},
	})
	if err != nil {
		return err
	}
	return d.push(ctx, stack, "manager", d.manager.Run)
}

// startControllers starts what acts on objects: sandboxes, pools, claims.
func (d *Daemon) startControllers(ctx context.Context, stack *lifecycle.Stack) error {
	scheme, err := cache.NewScheme()
	if err != nil {
		return err
	}
	recorder, flush, err := d.events(ctx, scheme)
	if err != nil {
		return err
	}
	if err := stack.Push(ctx, "events", func(ctx context.Context, ready func()) error {
		ready()
		<-ctx.Done()
		flush()
		return nil
	}); err != nil {
		return err
	}
	if err := d.push(ctx, stack, "repairs", func(ctx context.Context) error { return d.tellRepairs(ctx, recorder) }); err != nil {
		return err
	}
	return d.pushControllers(ctx, stack, recorder)
}

// starter is a controller.
type starter interface {
	Start(ctx context.Context) error
}

func (d *Daemon) pushControllers(ctx context.Context, stack *lifecycle.Stack, recorder events.EventRecorder) error {
	live, watched := d.cache.Live(), d.cache.Informers()
	for _, c := range []struct {
		name string
		make func() (starter, error)
	}{
		{"sandboxes", func() (starter, error) {
			return controllers.NewSandbox(controllers.SandboxConfig{
				Log: d.cfg.Log, Client: live, Cache: watched, Runner: d.machine.node, Node: d.cfg.NodeName, Changes: d.machine.node.Changes(), Events: recorder, Origins: d.cache,
				ForkSecrets: d.cfg.ForkSecrets, Served: d.picker.Served,
			})
		}},
		{"history", func() (starter, error) {
			return history.New(history.Config{Log: d.cfg.Log, Client: live, Cache: watched, Revisions: d.cache})
		}},
		{"checkpoints", func() (starter, error) {
			return checkpoint.New(checkpoint.Config{
				Log: d.cfg.Log, Client: live, Cache: watched, Objects: d.cache, Runner: d.machine.node, Node: d.cfg.NodeName, Events: recorder,
			})
		}},
		{"pools", func() (starter, error) {
			return warmpool.New(warmpool.Config{Log: d.cfg.Log, Client: live, Cache: watched, Objects: d.cache, WarmUps: d.cache, Events: recorder})
		}},
		{"warm-ups", func() (starter, error) {
			return warmup.New(warmup.Config{Log: d.cfg.Log, Client: live, Cache: watched, Objects: d.cache, Events: recorder})
		}},
		{"claims", func() (starter, error) {
			return claim.New(claim.Config{
				Log: d.cfg.Log, Client: live, Watched: watched, Cache: d.cache, Picker: d.picker, Quota: d.quotas,
				Binder: envBinder{d.binder}, Events: recorder, Metrics: d.metrics,
			})
		}},
	} {
		started, err := c.make()
		if err != nil {
			return err
		}
		if err := d.push(ctx, stack, c.name, started.Start); err != nil {
			return err
		}
	}
	return nil
}

// envBinder hands variables to agents for claims that are objects.
type envBinder struct{ agents *manager.AgentBinder }

// Bind implements claim.Binder.
func (b envBinder) Bind(ctx context.Context, s *agents.Sandbox, env map[string]string) error {
	return b.agents.Bind(ctx, s, envd.InitRequest{EnvVars: env})
}
