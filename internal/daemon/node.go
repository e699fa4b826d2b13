package daemon

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/feeds"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
	"github.com/barchan-dev/barchan/internal/daemon/imagegc"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/daemon/nodesocket"
	"github.com/barchan-dev/barchan/internal/edge/e2b"
	"github.com/barchan-dev/barchan/internal/node"
)

// openNode opens the files of the node, unless it is a process of its own.
func (d *Daemon) openNode(context.Context) (err error) {
	if err := d.openTokens(); err != nil || !d.cfg.RunsSandboxes() {
		return err
	}
	d.machine, err = machine.New(&d.cfg.Config, d.cfg.Log, machine.Hooks{
		Exists: d.exists, Objects: podObjects{d}, Tokens: d.tokens, Metrics: d.metrics, Health: d.health, Written: d.journalWritten, Repaired: d.repairs.Add,
		Event: d.event, ImagePulled: func() { d.images.Pulled() },
		ImageRoom: func(ctx context.Context, bytes int64) error { return d.images.Room(ctx, bytes) },
		Adopted: func(ctx context.Context, n *node.Node) error {
			return machine.CheckNodeName(ctx, d.cfg.NodeName, n, d.cache)
		},
	})
	return err
}

func (d *Daemon) nodeFiles() services {
	if d.machine == nil {
		return nil
	}
	return services{d.machine.Files()}
}

// makeNode configures the node's use of objects, or the connection to a node in a process of its own.
func (d *Daemon) makeNode(ctx context.Context) error {
	if d.machine == nil {
		d.apart = nodesocket.NewClient(d.cfg.NodeSocket)
		return nil
	}
	d.images = imagegc.New(imagegc.Config{
		Store: d.machine.Node.Images(), Node: d.machine.Node, Sizes: d.machine.Containers, Objects: d.cache.Live(),
		Limit: hostcheck.ImageLimit(&d.cfg.Config), Log: d.cfg.Log,
	})
	return d.machine.CheckExternal(ctx)
}

// event writes an Event of a sandbox for the node.
func (d *Daemon) event(ref sandbox.Ref, kind, reason, text string) {
	if d.recorder == nil {
		return
	}
	s := &agents.Sandbox{}
	s.APIVersion, s.Kind = agents.GroupVersion.String(), "Sandbox"
	s.Namespace, s.Name, s.UID = ref.Namespace, ref.Name, ref.UID
	d.recorder.Eventf(s, nil, kind, reason, "Run", "%s", text)
}

// nodeServices are ready when running sandboxes are adopted. They do not wait for a node in a process of its own, which may never
// be started, but for one that has started this process.
func (d *Daemon) nodeServices() services {
	if d.apart != nil && d.cfg.NodeComes {
		return services{{Name: "node watch", Run: func(ctx context.Context, ready func()) error {
			if err := d.apart.Await(ctx); err != nil {
				return err
			}
			ready()
			return d.apart.Watch(ctx, d.health)
		}}}
	}
	if d.apart != nil {
		return services{boot.Background("node watch", func(ctx context.Context) error { return d.apart.Watch(ctx, d.health) })}
	}
	return append(d.machine.Services(), boot.Background("containerd health", d.watchContainerd), boot.Background("image collector", d.images.Run))
}

// makeClaimTimes makes what a node knows of pools, since it starts members after claims, and of the quotas of volumes.
func (d *Daemon) makeClaimTimes(context.Context) (err error) {
	if err := d.makeQuotas(); err != nil {
		return err
	}
	d.picker, err = picker.New(picker.Config{Writer: d.objects, Log: d.cfg.Log})
	d.observers = []feeds.Observer{d.observeDeletion, d.picker.Observe}
	return err
}

func (d *Daemon) claimTimeServices() services {
	return services{{Name: "claims", Run: d.sandboxFeed}}
}

// openProbes answers at the node's address, which is for the operator, and makes what serves the files of volumes at its socket.
func (d *Daemon) openProbes(context.Context) error {
	d.open(d.details())
	key, err := d.tokens.Derive(volumes.PurposeTokens)
	if err != nil {
		return err
	}
	files := &volumes.Service{Objects: d.objects, Cache: d.cache, Files: d.machine.Node.Volumes, Log: d.cfg.Log, TokenKey: key, Gate: d.health}
	d.content, err = e2b.New(e2b.Config{Manager: &manager.Manager{Volumes: files}, Log: d.cfg.Log})
	return err
}

// nodeSocketServices answer the server of a node.
func (d *Daemon) nodeSocketServices() services {
	return services{boot.Background("node socket", func(ctx context.Context) error {
		return nodesocket.Serve(ctx, nodesocket.Config{
			Socket: d.cfg.NodeSocket, Group: d.cfg.NodeSocketGroup, Log: d.cfg.Log, DiskUsed: d.machine.Node.DiskUsed, TraceEgress: d.machine.Node.TraceEgress, Content: d.content,
			State: func() nodesocket.State {
				return nodesocket.State{Version: d.cfg.Version, DataDir: d.cfg.DataDir, Conditions: d.health.Conditions()}
			},
		})
	})}
}

// exists reads from the API server, not a cache: the result may delete a running sandbox.
func (d *Daemon) exists(ctx context.Context, ref sandbox.Ref) (bool, error) {
	s := &agents.Sandbox{}
	err := d.cache.Live().Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, s)
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("read sandbox %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return s.UID == ref.UID, nil
}

func (d *Daemon) watchContainerd(ctx context.Context) error {
	return d.host().WatchContainerd(ctx, d.machine.Containers.Check)
}

// host watches what the server depends on.
func (d *Daemon) host() hostcheck.Watcher {
	return hostcheck.Watcher{Config: &d.cfg.Config, Gate: d.health, Log: d.log}
}
