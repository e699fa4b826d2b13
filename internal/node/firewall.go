package node

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// watchRetry is the pause before the rules are watched, or restored, again.
const watchRetry = time.Second

// watchFirewall restores the rules of sandboxes when another program removes them, as nft flush ruleset does.
func (n *Node) watchFirewall(ctx context.Context) {
	for ctx.Err() == nil {
		err := n.network.Watch(ctx, func() { n.restoreFirewall(ctx) })
		if ctx.Err() == nil {
			n.log.ErrorContext(ctx, "firewall not watched", telemetry.Error, err)
		}
		lifecycle.Sleep(ctx, watchRetry)
	}
}

// restoreFirewall writes the rules of all sandboxes first: they then send nothing until each has its own policy and its
// port again.
func (n *Node) restoreFirewall(ctx context.Context) {
	began := time.Now()
	for n.network.Restore() != nil {
		if !lifecycle.Sleep(ctx, watchRetry) {
			return
		}
	}
	for _, u := range n.handles.All() {
		if err := n.restorePort(ctx, u); err != nil && ctx.Err() == nil {
			n.log.ErrorContext(ctx, "network of a sandbox not restored", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		}
	}
	n.firewallLosses.Inc()
	n.log.WarnContext(ctx, "firewall restored: another program had removed rules", telemetry.Duration, time.Since(began))
}

// restorePort gives a sandbox its policy, and then its port.
func (n *Node) restorePort(ctx context.Context, u *registry.Handle) error {
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return err
	}
	defer done()
	r := u.Row()
	if r == nil || u.IsRemoved() || !r.Stage.Begun() || r.OnDisk() || r.Stage == journal.Ended {
		return nil
	}
	if err := n.host.ApplyEgress(ctx, r); err != nil {
		return err
	}
	if err := n.network.Adopt(ctx, n.host.Operation(r).Endpoint()); err != nil {
		return err
	}
	n.cfg.Event(u.Ref, corev1.EventTypeWarning, "FirewallRestored", "another program removed the firewall's rules of this machine; they are restored")
	return nil
}
