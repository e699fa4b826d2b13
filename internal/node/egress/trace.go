package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Query is what a [Trace] decides about.
type Query struct {
	// Destination is an address or a domain name.
	Destination string
	Port        uint16
	// Protocol is "tcp", "udp" or another name, in any case.
	Protocol string
}

// Trace decides about the traffic of one sandbox.
type Trace struct {
	Policy Policy
	Pins   []Pin
	Host   HostRules
	// Lookup resolves a domain name as the sandbox would: an errs.ErrForbidden is one that it may not learn of.
	Lookup func(ctx context.Context, name string) ([]netip.Addr, error)
}

// Decide returns the decision about a query. Of a name with several addresses the verdict is Allowed if one of them is. An
// errs.ErrInvalid is a malformed query, an errs.ErrNotFound a name without addresses.
func (t Trace) Decide(ctx context.Context, q Query) (Decision, error) {
	if q.Protocol = strings.ToLower(q.Protocol); q.Protocol == "" {
		return Decision{}, fmt.Errorf("protocol: is empty: %w", errs.ErrInvalid)
	}
	if a, err := netip.ParseAddr(q.Destination); err == nil {
		return t.address(a, q), nil
	}
	if len(validation.IsDNS1123Subdomain(strings.ToLower(strings.TrimSuffix(q.Destination, ".")))) > 0 {
		return Decision{}, fmt.Errorf("destination: %q is neither an IP address nor a domain name: %w", q.Destination, errs.ErrInvalid)
	}
	return t.name(ctx, q)
}

func (t Trace) address(a netip.Addr, q Query) Decision {
	return Decide(t.Host, t.Policy, t.Pins, Packet{Address: a, Port: q.Port, Protocol: q.Protocol})
}

// internalName is the rule about a name that the resolver hides from sandboxes.
const internalName = "Barchan's resolver tells sandboxes of no internal names (settings internalZones, reachable)"

func (t Trace) name(ctx context.Context, q Query) (Decision, error) {
	d := DecideName(t.Policy, t.Pins, q.Destination)
	if d.Verdict != Allowed || t.Policy.UsesResolver() {
		return d, nil
	}
	addrs, err := t.Lookup(ctx, q.Destination)
	if errors.Is(err, errs.ErrForbidden) {
		return Decision{Verdict: Refused, Rule: internalName, Source: SourceHost}, nil
	}
	if err != nil {
		return Decision{}, err
	}
	var words []string
	d = Decision{}
	for _, a := range addrs {
		one := t.address(a, q)
		words = append(words, fmt.Sprintf("%s %s: %s", a, one.Verdict, one.Rule))
		if d.Verdict == "" || one.Verdict == Allowed && d.Verdict != Allowed {
			d = one
		}
	}
	d.Rule = strings.Join(words, "; ")
	return d, nil
}

// HostAddresses returns the addresses of the host's interfaces.
func HostAddresses() (all []netip.Addr) {
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
