package egress

import (
	"net/netip"
	"slices"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// notPublic are the ranges of sandbox.NotPublic, as rules.
var notPublic = closedRanges()

func closedRanges() (rules []Rule) {
	for _, r := range sandbox.NotPublic() {
		rules = append(rules, Rule{Prefix: r.Prefix, From: r.Name + " are closed (" + r.Prefix.String() + ")"})
	}
	return rules
}

// NotPublic are the ranges that are closed unless [HostRules.Reachable] has them.
func NotPublic() (prefixes []netip.Prefix) {
	for _, r := range notPublic {
		prefixes = append(prefixes, r.Prefix)
	}
	return prefixes
}

// HostRules is the operator's configuration for all sandboxes: no policy opens what it closes.
type HostRules struct {
	// Sandboxes are the ranges of the sandboxes.
	Sandboxes []netip.Prefix
	// Gateways are the addresses of Barchan's resolver.
	Gateways []netip.Addr
	// Machine are other addresses of the host; missing ones count as remote.
	Machine []netip.Addr
	// Resolvers are the only hosts allowed on port 53.
	Resolvers []netip.Addr
	// Reachable are open although they are not public.
	Reachable []netip.Prefix
}

// Offers reports whether sandboxes have addresses of the family of a.
func (g HostRules) Offers(a netip.Addr) bool {
	return slices.ContainsFunc(g.Sandboxes, func(p netip.Prefix) bool { return p.Addr().Is4() == a.Is4() })
}

// Open reports whether sandboxes without a policy may reach an address, DNS aside. Names are pinned
// to such addresses only.
func (g HostRules) Open(a netip.Addr) bool {
	d := g.decide(a, false)
	return d.Verdict == Allowed
}

// decide returns the decision of the host rules about an address.
func (g HostRules) decide(a netip.Addr, dns bool) Decision {
	isDNS := dns && slices.Contains(g.Resolvers, a)
	switch {
	case !g.Offers(a):
		return Decision{Verdict: Refused, Rule: "sandboxes have no IPv6 address (setting subnet6)"}
	case slices.Contains(g.Gateways, a) && dns:
		return Decision{Verdict: Resolver, Rule: "Barchan's resolver answers there"}
	case slices.Contains(g.Gateways, a), slices.Contains(g.Machine, a) && !isDNS:
		return Decision{Verdict: Refused, Rule: "the machine itself is closed"}
	case containsAny(g.Sandboxes, a):
		return Decision{Verdict: Refused, Rule: "other sandboxes are closed"}
	case isDNS:
		return Decision{Verdict: Allowed, Rule: "port 53 of " + a.String() + " is open (setting dnsResolvers)"}
	case dns:
		return Decision{Verdict: Refused, Rule: "port 53 is open at the sandboxes' resolvers only (setting dnsResolvers)"}
	}
	for _, p := range g.Reachable {
		if p.Contains(a) {
			return Decision{Verdict: Allowed, Rule: p.String() + " is open (setting reachable)"}
		}
	}
	if r, ok := find(notPublic, a); ok {
		return Decision{Verdict: Refused, Rule: r.From}
	}
	return Decision{Verdict: Allowed, Rule: "public addresses are open"}
}

func containsAny(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
