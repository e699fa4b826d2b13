package daemon

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/node"
)

// makeNode configures containerd and the node.
func (d *Daemon) makeNode(ctx context.Context) (err error) {
	d.machine, err = machine.New(&d.cfg.Config, d.cfg.Log, machine.Hooks{
		Exists: d.exists, Tokens: d.tokens, Metrics: d.metrics, Health: d.health, Written: d.journalWritten, Repaired: d.repaired,
		Adopted: func(ctx context.Context, n *node.Node) error {
			return machine.CheckNodeName(ctx, d.cfg.NodeName, n, d.cache)
		},
	})
	if err != nil {
		return err
	}
	return d.machine.CheckExternal(ctx)
}

// nodeServices are ready when running sandboxes are adopted.
func (d *Daemon) nodeServices() services {
	return append(d.machine.Services(), boot.Background("containerd health", d.watchContainerd))
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
