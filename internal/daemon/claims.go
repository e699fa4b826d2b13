package daemon

import (
	"context"
	"path/filepath"
	"slices"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/controllers/checkpoint"
	"github.com/barchan-dev/barchan/internal/control/controllers/claim"
	"github.com/barchan-dev/barchan/internal/control/controllers/history"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild"
	"github.com/barchan-dev/barchan/internal/control/controllers/volume"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmpool"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmup"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
)

// makeTables makes what decides from memory: routes, ready members, quotas, connections to agents.
func (d *Daemon) makeTables(context.Context) (err error) {
	if d.picker, err = picker.New(picker.Config{
		Writer: d.objects, Identity: d.cfg.NodeName, Log: d.cfg.Log, Metrics: d.metrics,
	}); err != nil {
		return err
	}
	if d.quotas, err = quota.New(quota.Config{Reader: d.cache, Log: d.cfg.Log, Defaults: d.quotaDefaults(), DefaultSize: quota.Size{
		MilliCPU: d.cfg.SandboxCPU.MilliValue(), Memory: d.cfg.SandboxMemory.Value(),
	}}); err != nil {
		return err
	}
	d.assumed = assumecache.New(d.cache.Sandbox)
	reach := agentclient.Config{Tokens: d.tokens}
	if d.verifier != nil {
		reach.Verifier = d.verifier
	}
	d.binder = agentclient.New(reach)
	d.observers = []observer{d.observeDeletion, d.assumed.Observe, d.picker.Observe, d.quotas.Observe, d.binder.Observe}
	if d.cfg.Role != config.RoleController { // which routes no requests
		d.observers = slices.Insert(d.observers, 0, d.observeRoute)
	}
	return nil
}

// tableServices are ready when every observer has received all listed sandboxes. The binder runs first, because it ignores
// sandboxes that it observes while it does not run.
func (d *Daemon) tableServices() services {
	list := services{boot.Background("binder", d.binder.Run), {Name: "routes", Run: d.feedTables}}
	if d.watches != nil {
		list = append(list, boot.Background("watch proof", d.proveWatch))
	}
	return list
}

// quotaDefaults are those of the settings, in which zero means that there is none.
func (d *Daemon) quotaDefaults() quota.Limits {
	limit := func(n int64) quota.Limit { return quota.Limit{Set: n > 0, Most: n} }
	return quota.Limits{
		Sandboxes: limit(int64(d.cfg.QuotaSandboxes)), MilliCPU: limit(d.cfg.QuotaCPU.MilliValue()),
		Volumes: limit(int64(d.cfg.QuotaVolumes)), VolumeCapacity: limit(d.cfg.QuotaVolumeCapacity.Value()),
		Memory: limit(d.cfg.QuotaMemory.Value()), CountPaused: d.cfg.QuotaCounts == config.QuotaAll,
	}
}

// makeManager makes what serves the APIs and the gateway.
func (d *Daemon) makeManager(context.Context) (err error) {
	var diskUsed func(context.Context, sandbox.Ref) (int64, error)
	switch {
	case d.machine != nil:
		diskUsed = d.machine.Node.DiskUsed
	case d.apart != nil:
		diskUsed = d.apart.DiskUsed
	}
	if d.cfg.Role == config.RoleServer {
		if d.builds, err = builds.Open(builds.Config{Dir: filepath.Join(d.cfg.DataDir, "builds")}); err != nil {
			return err
		}
	}
	d.manager, err = manager.New(manager.Config{
		Gate:    d.health,
		Objects: d.objects, Cache: d.cache, Picker: d.picker, Quota: d.quotas, Assumed: d.assumed, Binder: d.binder,
		Routes: d.replicatedRoutes(), Agents: d.binder, Tokens: d.tokens, Log: d.cfg.Log, Metrics: d.metrics, MaxTimeout: d.cfg.MaxTimeout,
		ForkSecrets: d.cfg.ForkSecrets,
		DiskUsed:    diskUsed,
		BuildFiles:  d.builds,
		VolumeFiles: d.volumeFiles(),
		DefaultSize: templates.Size{CPUs: int(d.cfg.SandboxCPU.Value()), MemoryMB: d.cfg.SandboxMemory.Value() >> 20},
	})
	return err
}

// volumeFiles returns the files of volumes, where the node is part of this server.
func (d *Daemon) volumeFiles() volumes.Files {
	if d.cfg.Role != config.RoleServer || d.machine == nil {
		return nil
	}
	return d.machine.Node.Volumes
}

func (d *Daemon) managerServices() services {
	return services{boot.Background("manager", d.manager.Run)}
}

// makeRecorder makes the recorder of Events, and its flush.
func (d *Daemon) makeRecorder(ctx context.Context) (err error) {
	scheme, err := cache.NewScheme()
	if err != nil {
		return err
	}
	d.recorder, d.flushEvents, err = d.events(ctx, scheme)
	return err
}

// controller acts on objects until ctx is done.
type controller interface {
	Start(ctx context.Context) error
}

// controllerServices act on objects: sandboxes and checkpoints where they run, pools and claims in a server.
func (d *Daemon) controllerServices() services {
	list := services{d.eventService()}
	var all []controllerSpec
	if d.machine != nil {
		list, all = append(list, boot.Background("repairs", d.recordRepairs)), d.nodeControllers()
	}
	if d.cfg.Role == config.RoleServer && d.machine != nil {
		all = append(all, d.volumeController())
	}
	if d.cfg.Role == config.RoleServer {
		all = slices.Concat(all, d.memoryControllers(), d.objectControllers(d.cache))
	}
	for _, c := range all {
		list = append(list, boot.Service{Name: c.name, Run: func(ctx context.Context, ready func()) error {
			made, err := c.make()
			if err != nil {
				return err
			}
			ready()
			return made.Start(ctx)
		}})
	}
	return list
}

// eventService writes the last Events when all that records them has ended.
func (d *Daemon) eventService() boot.Service {
	return boot.Background("events", func(ctx context.Context) error {
		<-ctx.Done()
		d.flushEvents()
		return nil
	})
}

// controllerSpec constructs one controller.
type controllerSpec struct {
	name string
	make func() (controller, error)
}

// nodeControllers run the sandboxes of this machine, and keep its checkpoints.
func (d *Daemon) nodeControllers() []controllerSpec {
	return []controllerSpec{
		{"sandboxes", func() (controller, error) {
			return controllers.NewSandbox(controllers.SandboxConfig{
				Log: d.cfg.Log, Client: d.cache.Live(), Cache: d.cache.Informers(), Runner: d.machine.Node, Node: d.cfg.NodeName, Changes: d.machine.Node.Changes(), Events: d.recorder, Origins: d.cache, References: d.cache,
				ForkSecrets: d.cfg.ForkSecrets, LastWarmClaim: d.picker.LastWarmClaim,
			})
		}},
		{"checkpoints", func() (controller, error) {
			return checkpoint.New(checkpoint.Config{
				Log: d.cfg.Log, Client: d.cache.Live(), Cache: d.cache.Informers(), Objects: d.cache, Runner: d.machine.Node, Node: d.cfg.NodeName, Events: d.recorder,
			})
		}},
	}
}

// volumeController needs the quotas of a server, and the files of a node, in one process.
func (d *Daemon) volumeController() controllerSpec {
	return controllerSpec{"volumes", func() (controller, error) {
		return volume.New(volume.Config{
			Log: d.cfg.Log, Client: d.cache.Live(), Cache: d.cache.Informers(), Objects: d.cache, Runner: d.machine.Node.Volumes, Quotas: d.quotas,
		})
	}}
}

// memoryControllers need a node that keeps memory and files.
func (d *Daemon) memoryControllers() []controllerSpec {
	return []controllerSpec{
		{"warm-ups", func() (controller, error) {
			return warmup.New(warmup.Config{Log: d.cfg.Log, Client: d.cache.Live(), Cache: d.cache.Informers(), Objects: d.cache, Events: d.recorder})
		}},
		{"template builds", func() (controller, error) {
			return templatebuild.New(templatebuild.Config{
				Log: d.cfg.Log, Client: d.cache.Live(), Cache: d.cache.Informers(), Objects: d.cache, Agents: d.binder, Quota: d.quotas,
				Store: d.builds, PublicNamespace: templates.PublicNamespace, ImageDigest: d.imageDigest(), Events: d.recorder,
			})
		}},
	}
}

// imageDigest returns how builds learn an image's digest; nil where the images are those of another process.
func (d *Daemon) imageDigest() func(ctx context.Context, namespace, ref string, secrets []string) (string, error) {
	if d.machine == nil {
		return nil
	}
	return d.machine.Node.ImageDigest
}

// objectControllers only read and write objects. warmUps is nil where no checkpoint can be taken.
func (d *Daemon) objectControllers(warmUps warmpool.WarmUps) []controllerSpec {
	return []controllerSpec{
		{"history", func() (controller, error) {
			return history.New(history.Config{Log: d.cfg.Log, Client: d.cache.Live(), Cache: d.cache.Informers(), Revisions: d.cache})
		}},
		{"pools", func() (controller, error) {
			return warmpool.New(warmpool.Config{Log: d.cfg.Log, Client: d.cache.Live(), Cache: d.cache.Informers(), Objects: d.cache, WarmUps: warmUps, Events: d.recorder})
		}},
		{"claims", func() (controller, error) {
			return claim.New(claim.Config{
				Log: d.cfg.Log, Client: d.cache.Live(), Watched: d.cache.Informers(), Cache: d.cache, Picker: d.picker, Quota: d.quotas, Assumed: d.assumed,
				Binder: d.binder, Events: d.recorder, Metrics: d.metrics,
			})
		}},
	}
}
