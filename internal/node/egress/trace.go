package egress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Trace decides about the traffic of one sandbox to a port.
type Trace struct {
	Policy Policy
	Pins   []Pin
	Host   HostRules
	Port   uint16
	// Protocol is "tcp", "udp" or another name in lower case.
	Protocol string
	// Lookup resolves a domain name as the sandbox would.
	Lookup func(ctx context.Context, name string) ([]netip.Addr, error)
}

// Decide returns the decision about a destination, an address or a domain name. Of a name with several addresses the verdict
// is Allowed if one of them is. An errs.ErrInvalid is a destination that is neither, an errs.ErrNotFound a name without
// addresses.
func (t Trace) Decide(ctx context.Context, destination string) (Decision, error) {
	if a, err := netip.ParseAddr(destination); err == nil {
		return t.address(a), nil
	}
	if len(validation.IsDNS1123Subdomain(strings.ToLower(strings.TrimSuffix(destination, ".")))) > 0 {
		return Decision{}, fmt.Errorf("%q is neither an IP address nor a domain name: %w", destination, errs.ErrInvalid)
	}
	return t.name(ctx, destination)
}

func (t Trace) address(a netip.Addr) Decision {
	return Decide(t.Host, t.Policy, t.Pins, Packet{Address: a, Port: t.Port, Protocol: t.Protocol})
}

func (t Trace) name(ctx context.Context, name string) (Decision, error) {
	d := DecideName(t.Policy, t.Pins, name)
	if d.Verdict != Allowed || t.Policy.UsesResolver() {
		return d, nil
	}
	addrs, err := t.Lookup(ctx, name)
	if err != nil {
		return Decision{}, err
	}
	var words []string
	d = Decision{}
	for _, a := range addrs {
		one := t.address(a)
		words = append(words, fmt.Sprintf("%s %s: %s", a, one.Verdict, one.Rule))
		if one.Verdict == Allowed || d.Verdict == "" {
			d.Verdict = one.Verdict
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
