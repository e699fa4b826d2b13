package daemon

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/controllers/placement"
	"github.com/barchan-dev/barchan/internal/control/controllers/podrun"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/election"
)

const (
	// leaseName is the Lease of all controllers of a cluster.
	leaseName = "barchan-controller"
	// podWorkers reconcile sandboxes of one namespace: they mostly wait for the API server and for agents.
	podWorkers = 32
)

// makeRunner makes what runs sandboxes as Pods.
func (d *Daemon) makeRunner(ctx context.Context) error {
	placer, err := placement.New(placement.Config{
		Client: d.cache.Live(), Cache: d.cache.Informers(), Tokens: d.tokens, AgentImage: d.cfg.AgentImage, ImageVolumes: d.cfg.ImageVolumes,
		RuntimeClass: d.cfg.RuntimeClass, ClusterDomain: d.cfg.ClusterDomain, Namespace: d.cfg.LeaseNamespace, Reachable: d.cfg.Reachable,
	})
	if err != nil {
		return err
	}
	d.runner, err = podrun.New(podrun.Config{Log: d.cfg.Log, Cache: d.cache, Placer: placer, Agents: d.binder, Tokens: d.tokens, LastWarmClaim: d.picker.LastWarmClaim})
	if err != nil {
		return err
	}
	d.open(d.probes())
	return d.makeRecorder(ctx)
}

// electionServices run the controllers while this process holds the Lease.
func (d *Daemon) electionServices() services {
	return services{d.eventService(), boot.Background("election", d.elect)}
}

func (d *Daemon) elect(ctx context.Context) error {
	leases, err := coordination.NewForConfig(d.rest)
	if err != nil {
		return fmt.Errorf("client of the Lease: %w", err)
	}
	return election.Run(ctx, election.Config{Leases: leases, Namespace: d.cfg.LeaseNamespace, Name: leaseName, Identity: d.cfg.NodeName}, func(ctx context.Context) error {
		d.log.InfoContext(ctx, "leader; controllers start", "lease", leaseName, telemetry.Namespace, d.cfg.LeaseNamespace)
		all, ctx := errgroup.WithContext(ctx)
		for _, c := range d.clusterControllers() {
			all.Go(func() error {
				made, err := c.make()
				if err != nil {
					return err
				}
				return made.Start(ctx)
			})
		}
		return all.Wait()
	})
}

// clusterControllers are those of a cluster, where Pods run sandboxes.
func (d *Daemon) clusterControllers() []controllerSpec {
	return append([]controllerSpec{d.checkpointController(nil, ""), {"sandboxes", func() (controller, error) {
		return controllers.NewSandbox(controllers.SandboxConfig{
			Log: d.cfg.Log, Client: d.cache.Live(), Cache: d.cache.Informers(), Runner: d.runner, Events: d.recorder,
			Sources: d.runner.Changes(d.cache.Informers()), Workers: 2 * podWorkers, Share: podWorkers, Starts: podWorkers,
			LastWarmClaim: d.picker.LastWarmClaim, Assumed: d.assumed, Tracing: d.tracing(),
		})
	}}}, d.objectControllers(nil)...)
}
