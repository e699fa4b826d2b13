package egress

import (
	"net/netip"
	"slices"
)

// notPublic are the ranges that sandboxes reach only if the operator allows them. IPv4: private,
// link-local (with the metadata address of clouds), shared, documentation, multicast and reserved
// ranges. IPv6: everything except global unicast, and the parts of that which embed other
// addresses.
var notPublic = []Rule{
	closed("0.0.0.0/8", "addresses of this network"),
	closed("10.0.0.0/8", "private ranges"),
	closed("100.64.0.0/10", "shared ranges"),
	closed("127.0.0.0/8", "loopback addresses"),
	closed("169.254.0.0/16", "link-local and metadata addresses"),
	closed("172.16.0.0/12", "private ranges"),
	closed("192.0.0.0/24", "ranges for protocols"),
	closed("192.0.2.0/24", "ranges for documentation"),
	closed("192.168.0.0/16", "private ranges"),
	closed("198.18.0.0/15", "ranges for measurements"),
	closed("198.51.100.0/24", "ranges for documentation"),
	closed("203.0.113.0/24", "ranges for documentation"),
	closed("224.0.0.0/3", "multicast and reserved ranges"),
	closed("fc00::/7", "private ranges"),
	closed("fe80::/10", "link-local addresses"),
	closed("2001:db8::/32", "ranges for documentation"),
	closed("3fff::/20", "ranges for documentation"),
	closed("2001::/23", "ranges for protocols"),
	closed("2002::/16", "IPv4 addresses embedded in IPv6"),
	closed("::/3", "ranges that are not global unicast"),
	closed("4000::/2", "ranges that are not global unicast"),
	closed("8000::/1", "ranges that are not global unicast"),
}

func closed(prefix, what string) Rule {
	return Rule{Prefix: netip.MustParsePrefix(prefix), From: what + " are closed (" + prefix + ")"}
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
		return Decision{Refused, "sandboxes have no IPv6 address (setting subnet6)"}
	case slices.Contains(g.Gateways, a) && dns:
		return Decision{Resolver, "Barchan's resolver answers there"}
	case slices.Contains(g.Gateways, a), slices.Contains(g.Machine, a) && !isDNS:
		return Decision{Refused, "the machine itself is closed"}
	case containsAny(g.Sandboxes, a):
		return Decision{Refused, "other sandboxes are closed"}
	case isDNS:
		return Decision{Allowed, "port 53 of " + a.String() + " is open (setting dnsResolvers)"}
	case dns:
		return Decision{Refused, "port 53 is open at the sandboxes' resolvers only (setting dnsResolvers)"}
	}
	for _, p := range g.Reachable {
		if p.Contains(a) {
			return Decision{Allowed, p.String() + " is open (setting reachable)"}
		}
	}
	if r, ok := find(notPublic, a); ok {
		return Decision{Refused, r.From}
	}
	return Decision{Allowed, "public addresses are open"}
}

func containsAny(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
