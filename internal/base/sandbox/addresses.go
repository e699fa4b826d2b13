package sandbox

import "net/netip"

// AddressRange is a range of addresses and a name for it, in the plural.
type AddressRange struct {
	Prefix netip.Prefix
	Name   string
}

// NotPublic returns the ranges that sandboxes reach only if the operator allows them. IPv4: private,
// link-local (with the metadata address of clouds), shared, documentation, multicast and reserved
// ranges, and the addresses at which clouds serve their machines. IPv6: everything except global unicast, and the parts of that which embed other
// addresses.
func NotPublic() []AddressRange {
	named := func(prefix, name string) AddressRange { return AddressRange{netip.MustParsePrefix(prefix), name} }
	return []AddressRange{
		named("0.0.0.0/8", "addresses of this network"),
		named("10.0.0.0/8", "private ranges"),
		named("100.64.0.0/10", "shared ranges"),
		named("127.0.0.0/8", "loopback addresses"),
		named("168.63.129.16/32", "platform addresses of clouds"), // Azure's wire server
		named("169.254.0.0/16", "link-local and metadata addresses"),
		named("172.16.0.0/12", "private ranges"),
		named("192.0.0.0/24", "ranges for protocols"),
		named("192.0.2.0/24", "ranges for documentation"),
		named("192.88.99.0/24", "relays of 6to4"),
		named("192.168.0.0/16", "private ranges"),
		named("198.18.0.0/15", "ranges for measurements"),
		named("198.51.100.0/24", "ranges for documentation"),
		named("203.0.113.0/24", "ranges for documentation"),
		named("224.0.0.0/3", "multicast and reserved ranges"),
		named("fc00::/7", "private ranges"),
		named("fe80::/10", "link-local addresses"),
		named("2001:db8::/32", "ranges for documentation"),
		named("3fff::/20", "ranges for documentation"),
		named("2001::/23", "ranges for protocols"),
		named("2002::/16", "IPv4 addresses embedded in IPv6"),
		named("::/3", "ranges that are not global unicast"),
		named("4000::/2", "ranges that are not global unicast"),
		named("8000::/1", "ranges that are not global unicast"),
	}
}
