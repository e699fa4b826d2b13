package node

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/registry"
	"github.com/barchan-dev/barchan/internal/node/resolver"
)

// dnsPort is the port of the sandboxes' resolver.
const dnsPort = 53

// SetEgress enforces the egress policy of a sandbox's object before it returns. It does nothing if the policy is in force, or
// if the sandbox is not on the node, because creates apply it. A paused sandbox gets it when it is resumed.
//
// It writes the journal first, so that the next start corrects the rules after a crash. Kinds of error: errs.ErrInvalid, an
// invalid policy; errs.ErrUnavailable, a retry may succeed.
func (n *Node) SetEgress(ctx context.Context, s *agents.Sandbox) error {
	if err := n.awaitAdopted(ctx); err != nil {
		return err
	}
	var wish plan.Plan
	wish.SetNetwork(s)
	want, err := wish.Egress()
	if err != nil {
		return err
	}
	u := n.handles.Lookup(s.UID)
	if u == nil || !n.lacksEgress(u.Row(), want) {
		return nil
	}
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return err
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || !n.lacksEgress(r, want) {
		return nil
	}
	changed := *r
	changed.Plan.SetNetwork(s)
	if !noted(r, want) {
		err = n.handles.Note(u, &changed, r.Stage)
	}
	if err == nil {
		err = n.host.ApplyEgress(ctx, &changed)
	}
	if err != nil {
		return fmt.Errorf("set egress policy of sandbox %s/%s: %w", s.Namespace, s.Name, errs.Retryable(err))
	}
	n.log.InfoContext(ctx, "egress policy set", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name)
	return nil
}

// noted reports whether the journal has a policy.
func noted(r *journal.Row, p egress.Policy) bool {
	have, err := r.Plan.Egress()
	return err == nil && have.Equal(p)
}

// lacksEgress reports whether a policy that could be in force now is not.
func (n *Node) lacksEgress(r *journal.Row, p egress.Policy) bool {
	if r == nil || !r.Stage.Begun() {
		return false
	}
	if !noted(r, p) {
		return true
	}
	have, known := n.network.Egress(string(r.Plan.ID))
	return !r.OnDisk() && (!known || !have.Equal(p))
}

// adoptEgress applies the policy of the journal. Until it succeeds, the kernel's rules stay as they are, and the resolver
// does not answer a sandbox with rules.
func (n *Node) adoptEgress(ctx context.Context, u *registry.Handle, r *journal.Row) {
	if err := n.host.ApplyEgress(ctx, r); err != nil {
		n.log.ErrorContext(ctx, "egress policy of the journal not applied", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}

func (c *Config) internalNames() resolver.Internal {
	return resolver.Internal{Reachable: c.Network.Reachable, Zones: c.InternalZones}
}

// newResolver returns the DNS server of this node's sandboxes.
func (n *Node) newResolver() (*resolver.Resolver, error) {
	host := n.network.HostRules()
	cfg := resolver.Config{Clients: host.Sandboxes, Sandboxes: n.network, Internal: n.cfg.internalNames(), Log: n.cfg.Log, Metrics: n.cfg.Metrics}
	for _, a := range host.Gateways {
		cfg.Listen = append(cfg.Listen, netip.AddrPortFrom(a, dnsPort))
	}
	for _, a := range n.cfg.Upstreams { // the resolver itself is no upstream
		if !slices.Contains(host.Gateways, a.Addr()) {
			cfg.Upstreams = append(cfg.Upstreams, a)
		}
	}
	return resolver.New(cfg)
}

// TraceEgress returns the verdict about a sandbox's traffic, and the rule that decides; see egress.Trace. An errs.ErrNotFound is
// also a sandbox that is not on the node.
func (n *Node) TraceEgress(ctx context.Context, id sandbox.ID, q egress.Query) (egress.Decision, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return egress.Decision{}, err
	}
	r := n.handles.RowOf(id)
	if r == nil {
		return egress.Decision{}, fmt.Errorf("sandbox %s is not on this node: %w", id, errs.ErrNotFound)
	}
	p, known := n.network.Egress(string(id))
	if !known || r.OnDisk() {
		var err error
		if p, err = r.Plan.Egress(); err != nil {
			return egress.Decision{}, err
		}
	}
	t := egress.Trace{Policy: p, Pins: n.network.Pins(string(id)), Host: n.network.HostRules(), Lookup: n.resolver.Lookup}
	t.Host.Machine = egress.HostAddresses()
	return t.Decide(ctx, q)
}
