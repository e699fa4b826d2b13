package daemon

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
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
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/podlogs"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/eventlog"
	"github.com/barchan-dev/barchan/internal/daemon/feeds"
	"github.com/barchan-dev/barchan/internal/daemon/quotas"
	"github.com/barchan-dev/barchan/internal/daemon/staleness"
	"github.com/barchan-dev/barchan/internal/node/egress"
)

// makeTables makes what decides from memory: routes, ready members, quotas, connections to agents.
func (d *Daemon) makeTables(context.Context) (err error) {
	if d.picker, err = picker.New(picker.Config{
		Writer: d.objects, Identity: d.cfg.NodeName, Log: d.cfg.Log, Metrics: d.metrics,
	}); err != nil {
		return err
	}
	if err := d.makeQuotas(); err != nil {
		return err
	}
	shown := d.cache.Sandbox
	if d.cfg.Role != config.RoleController { // which lists nothing for clients
		d.listing = sandboxes.NewListing()
		shown = d.listing.Sandbox // an assumption lasts until lists show the object
	}
	d.assumed = assumecache.New(shown)
	reach := agentclient.Config{Tokens: d.tokens}
	if d.verifier != nil {
		reach.Verifier = d.verifier
	}
	d.binder = agentclient.New(reach)
	d.phases = &feeds.Phases{}
	d.observers = []feeds.Observer{d.observeDeletion, d.phases.Observe, d.assumed.Observe, d.picker.Observe, d.quotas.Observe, d.binder.Observe}
	if d.cfg.Role != config.RoleController { // which routes no requests
		d.observers = slices.Insert(d.observers, 0, feeds.Route(d.routes), d.listing.Observe)
	}
	if d.cfg.Role != config.RoleServer && !d.ofCluster() {
		return nil
	}
	// On a cluster no role reads Secrets, which webhooks are.
	if d.eventLog, err = eventlog.Open(eventlog.Config{
		Dir: filepath.Join(d.cfg.DataDir, "events"), Cache: d.cache, Quota: d.quotas, Size: d.defaultSize(), Allowed: d.cfg.WebhookAllow, Log: d.cfg.Log, Metrics: d.metrics,
		NoWebhooks: d.ofCluster(),
	}); err != nil {
		return err
	}
	d.observers = append(d.observers, d.eventLog.Observe)
	return nil
}

func (d *Daemon) makeQuotas() (err error) {
	cfg := quota.Config{Reader: d.cache, Log: d.cfg.Log, Defaults: quotas.Defaults(&d.cfg.Config), DefaultSize: quota.Size{
		MilliCPU: d.cfg.SandboxCPU.MilliValue(), Memory: d.cfg.SandboxMemory.Value(),
	}}
	if d.api != nil {
		cfg.Contents = d.api.Contents
	}
	d.quotas, err = quota.New(cfg)
	return err
}

// tableServices are ready when every observer has received all listed sandboxes. The binder runs first, because it ignores
// sandboxes that it observes while it does not run.
func (d *Daemon) tableServices() services {
	list := services{boot.Background("binder", d.binder.Run), {Name: "routes", Run: d.sandboxFeed}}
	if d.cfg.Role != config.RoleController { // which creates nothing that they count, but sandboxes
		list = append(list, boot.Service{Name: "quotas", Run: d.quotaFeed().Run})
	}
	if d.watches != nil {
		list = append(list, boot.Background("watch proof", d.proveWatch))
	}
	return list
}

func (d *Daemon) observeDeletion(older, newer *agents.Sandbox) {
	if newer == nil && d.machine != nil {
		d.machine.Node.ObjectDeleted(older.Namespace, older.Name)
	}
}

// sandboxFeed passes sandboxes to the observers of this role, until ctx is done.
func (d *Daemon) sandboxFeed(ctx context.Context, ready func()) error {
	feed := feeds.Sandboxes{Cache: d.cache, Routes: d.routes, Observers: d.observers}
	if d.watches != nil && d.verifier == nil {
		feed.TrustUntil = d.started.Add(d.stale)
	}
	return feed.Run(ctx, ready)
}

func (d *Daemon) quotaFeed() *feeds.Quotas {
	return &feeds.Quotas{Cache: d.cache, Quotas: d.quotas, ServerKinds: d.cfg.Role == config.RoleServer}
}

// proveWatch extends the trust in a replica's routes as far as its watch proves. With a verifier they are trusted without.
func (d *Daemon) proveWatch(ctx context.Context) error {
	cfg := staleness.Config{
		Log: d.log, Stale: d.stale, Began: d.started, Live: d.cache.Live(), Watches: d.watches, Trust: d.routes.TrustUntil, Gate: d.health,
		Passed: func(ctx context.Context) (string, error) { return cache.Passed[*agents.Sandbox](ctx, d.cache) },
	}
	if d.verifier != nil {
		cfg.Trust = nil
	}
	return staleness.Run(ctx, cfg)
}

// makeManager makes what serves the APIs and the gateway.
func (d *Daemon) makeManager(context.Context) (err error) {
	var diskUsed func(context.Context, sandbox.Ref) (int64, error)
	var traceEgress func(context.Context, sandbox.ID, sandboxes.EgressQuery) (sandboxes.EgressDecision, error)
	switch {
	case d.machine != nil:
		diskUsed, traceEgress = d.machine.Node.DiskUsed, traceBy(d.machine.Node.TraceEgress)
	case d.apart != nil:
		diskUsed, traceEgress = d.apart.DiskUsed, traceBy(d.apart.TraceEgress)
	}
	if d.cfg.Role == config.RoleServer {
		if d.builds, err = builds.Open(builds.Config{Dir: filepath.Join(d.cfg.DataDir, "builds")}); err != nil {
			return err
		}
	}
	var reader sandboxes.Agents = d.binder
	if d.ofCluster() {
		pods, err := corev1client.NewForConfig(d.rest)
		if err != nil {
			return fmt.Errorf("client of Pods: %w", err)
		}
		d.podLogs = &podlogs.Agents{Client: d.binder, Pods: pods}
		reader = d.podLogs
	}
	store, hooks := d.eventLog.Parts()
	d.manager, err = manager.New(manager.Config{
		Gate:    d.health,
		Objects: d.objects, Cache: d.cache, Picker: d.picker, Quota: d.quotas, Assumed: d.assumed, Listing: d.listing, Binder: d.binder,
		Routes: d.replicatedRoutes(), Agents: reader, Tokens: d.tokens, Log: d.cfg.Log, Metrics: d.metrics, MaxTimeout: d.cfg.MaxTimeout,
		ForkSecrets: d.cfg.ForkSecrets,
		DiskUsed:    diskUsed,
		TraceEgress: traceEgress,
		BuildFiles:  d.builds, Pods: d.ofCluster(),
		VolumeFiles: d.volumeFiles(),
		DefaultSize: d.defaultSize(),
		Events:      store, Webhooks: hooks,
	})
	return err
}

// traceBy has a node decide about egress for the manager.
func traceBy(trace func(context.Context, sandbox.ID, egress.Query) (egress.Decision, error)) func(context.Context, sandbox.ID, sandboxes.EgressQuery) (sandboxes.EgressDecision, error) {
	return func(ctx context.Context, id sandbox.ID, q sandboxes.EgressQuery) (sandboxes.EgressDecision, error) {
		d, err := trace(ctx, id, egress.Query{Destination: q.Destination, Port: uint16(q.Port), Protocol: q.Protocol}) //nolint:gosec // validated
		return sandboxes.EgressDecision{Verdict: string(d.Verdict), Rule: d.Rule, Source: string(d.Source)}, err
	}
}

func (d *Daemon) defaultSize() templates.Size {
	return templates.Size{CPUs: int(d.cfg.SandboxCPU.Value()), MemoryMB: d.cfg.SandboxMemory.Value() >> 20}
}

// volumeFiles returns the files of volumes; nil on a cluster.
func (d *Daemon) volumeFiles() volumes.Files {
	switch {
	case d.machine != nil:
		return d.machine.Node.Volumes
	case d.apart != nil, d.hasServer():
		return filesApart{}
	}
	return nil
}

// filesApart are with a node in a process of its own, or with a replica's server, which gets the requests for them: see httpAPI.
type filesApart struct{}

// Tree implements volumes.Files.
func (filesApart) Tree(volumetree.Ref) (*volumetree.Tree, error) {
	return nil, errs.Public(errs.ErrUnavailable, "the files of volumes are with the node")
}

// Take implements volumes.Files.
func (f filesApart) Take(v volumetree.Ref, _, _ int64) error {
	_, err := f.Tree(v)
	return err
}

func (d *Daemon) managerServices() services {
	list := services{boot.Background("manager", d.manager.Run), boot.Background("key uses", func(ctx context.Context) error { return d.manager.Keys.Run(ctx, d.cache.Live()) })}
	if d.eventLog != nil {
		list = append(list, boot.Background("events", d.eventLog.Run))
	}
	return list
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
		list, all = append(list, boot.Background("repairs", func(ctx context.Context) error { return d.repairs.Record(ctx, d.cache, d.recorder) })), d.nodeControllers()
	}
	if d.machine != nil {
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
				ForkSecrets: d.cfg.ForkSecrets, LastWarmClaim: d.picker.LastWarmClaim, Tracing: d.tracing(),
			})
		}},
		d.checkpointController(d.machine.Node, d.cfg.NodeName),
	}
}

// checkpointController keeps the checkpoints of a node. Without one it refuses them.
func (d *Daemon) checkpointController(runner controllers.CheckpointRunner, node string) controllerSpec {
	return controllerSpec{"checkpoints", func() (controller, error) {
		return checkpoint.New(checkpoint.Config{
			Log: d.cfg.Log, Client: d.cache.Live(), Cache: d.cache.Informers(), Objects: d.cache, Runner: runner, Node: node, Events: d.recorder,
		})
	}}
}

// volumeController keeps the files of volumes of this machine.
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
			cfg := claim.Config{
				Log: d.cfg.Log, Client: d.cache.Live(), Watched: d.cache.Informers(), Cache: d.cache, Picker: d.picker, Quota: d.quotas, Assumed: d.assumed,
				Binder: d.binder, Events: d.recorder, Metrics: d.metrics, Tracing: d.tracing(),
			}
			if d.cfg.Role == config.RoleController {
				cfg.UpstreamMetrics, cfg.Annotate = d.metrics, true
			}
			return claim.New(cfg)
		}},
	}
}
