package node

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

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

// dnsPort is where DNS is asked for.
const dnsPort = 53

// SetEgress has a sandbox reach what its object says, and nothing else, from the moment that it
// returns. What is in force already costs nothing. One that sleeps has it when it wakes; for
// one that is not on the node there is nothing to do, because it is made with it.
//
// The journal is written first: a death after that leaves rules that the next start corrects.
// Kinds of error: errs.ErrInvalid for a policy that cannot be; errs.ErrUnavailable, where a
// retry may help.
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
		return fmt.Errorf("set what sandbox %s/%s may reach: %w", s.Namespace, s.Name, errs.Retryable(err))
	}
	n.log.InfoContext(ctx, "sandbox may reach what its object says", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name)
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

// adoptEgress puts in force what the journal says. Until it succeeds, what the kernel has stays
// as it is, and names are answered to a sandbox with rules not at all.
func (n *Node) adoptEgress(ctx context.Context, u *registry.Handle, r *journal.Row) {
	if err := n.host.ApplyEgress(ctx, r); err != nil {
		n.log.ErrorContext(ctx, "what a sandbox may reach is not as its journal says", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}

// newResolver makes the DNS server of this node's sandboxes.
func (n *Node) newResolver() (*resolver.Resolver, error) {
	ground := n.network.Ground()
	cfg := resolver.Config{Clients: ground.Sandboxes, Sandboxes: n.network, Log: n.cfg.Log, Metrics: n.cfg.Metrics}
	for _, a := range ground.Gateways {
		cfg.Listen = append(cfg.Listen, netip.AddrPortFrom(a, dnsPort))
	}
	for _, a := range n.cfg.Upstreams { // one who asks itself gets no answer
		if !slices.Contains(ground.Gateways, a.Addr()) {
			cfg.Upstreams = append(cfg.Upstreams, a)
		}
	}
	return resolver.New(cfg)
}

// upstreams are the servers that the sandboxes' resolver asks: those of the operator, or the
// machine's own, also such that only the machine itself can reach.
func upstreams(configured []netip.Addr) (all []netip.AddrPort) {
	if len(configured) == 0 {
		if text, err := os.ReadFile("/etc/resolv.conf"); err == nil {
			configured = nameservers(string(text))
		}
	}
	if len(configured) == 0 {
		configured = publicResolvers()
	}
	for _, a := range configured {
		all = append(all, netip.AddrPortFrom(a.Unmap(), dnsPort))
	}
	return all
}

// nameservers are those that a resolv.conf names.
func nameservers(text string) (found []netip.Addr) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(fields[1]); err == nil {
			found = append(found, a)
		}
	}
	return found
}

// hostResolvers are the machine's own resolvers that a sandbox could reach, or public ones
// where the machine's listen on loopback only.
func hostResolvers() []netip.Addr {
	for _, file := range []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"} {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		found := slices.DeleteFunc(nameservers(string(text)), func(a netip.Addr) bool { return !a.Is4() || a.IsLoopback() })
		if len(found) > 0 {
			return found
		}
	}
	return publicResolvers()
}

func publicResolvers() []netip.Addr {
	return []netip.Addr{netip.AddrFrom4([4]byte{1, 1, 1, 1}), netip.AddrFrom4([4]byte{8, 8, 8, 8})}
}

// TraceEgress says which rule decides about what a sandbox sends to a destination, an address or
// a name, and what it decides. Protocol is "tcp", "udp" or another name in small letters. Of a
// name with several addresses the verdict is "allowed" if one of them is.
//
// Kinds of error: errs.ErrNotFound for a sandbox that is not on the node, or a name without
// addresses; errs.ErrInvalid for a destination that is neither address nor name.
func (n *Node) TraceEgress(ctx context.Context, id sandbox.ID, dest string, port uint16, protocol string) (egress.Decision, error) {
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
	t := trace{n: n, policy: p, pins: n.network.Pins(string(id)), ground: n.network.Ground(), port: port, protocol: strings.ToLower(protocol)}
	t.ground.Machine = machineAddresses()
	if a, err := netip.ParseAddr(dest); err == nil {
		return t.address(a), nil
	}
	if len(validation.IsDNS1123Subdomain(strings.ToLower(strings.TrimSuffix(dest, ".")))) > 0 {
		return egress.Decision{}, fmt.Errorf("%q is neither an IP address nor a domain name: %w", dest, errs.ErrInvalid)
	}
	return t.name(ctx, dest)
}

// trace is one question of TraceEgress.
type trace struct {
	n        *Node
	policy   egress.Policy
	pins     []egress.Pin
	ground   egress.HostRules
	port     uint16
	protocol string
}

func (t trace) address(a netip.Addr) egress.Decision {
	return egress.Decide(t.ground, t.policy, t.pins, egress.Packet{Address: a, Port: t.port, Protocol: t.protocol})
}

func (t trace) name(ctx context.Context, name string) (egress.Decision, error) {
	d := egress.DecideName(t.policy, t.pins, name)
	if d.Verdict != egress.Allowed || t.policy.UsesResolver() {
		return d, nil
	}
	addrs, err := t.n.resolver.Lookup(ctx, name)
	if err != nil {
		return egress.Decision{}, err
	}
	var words []string
	d = egress.Decision{}
	for _, a := range addrs {
		one := t.address(a)
		words = append(words, fmt.Sprintf("%s %s: %s", a, one.Verdict, one.Rule))
		if one.Verdict == egress.Allowed || d.Verdict == "" {
			d.Verdict = one.Verdict
		}
	}
	d.Rule = strings.Join(words, "; ")
	return d, nil
}

// machineAddresses are the machine's own, as far as it tells them.
func machineAddresses() (all []netip.Addr) {
	found, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	for _, a := range found {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			all = append(all, p.Addr().Unmap())
		}
	}
	return all
}
