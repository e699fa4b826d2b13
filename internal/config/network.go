package config

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/barchan-dev/barchan/internal/config/setting"
)

func (c *Config) checkSubnet() error {
	s := c.Subnet
	switch {
	case !s.IsValid():
		return setting.Invalid("subnet", "is empty, want an IPv4 subnet such as 10.87.0.0/16")
	case !s.Addr().Is4():
		return setting.Invalid("subnet", "%s is not an IPv4 subnet such as 10.87.0.0/16", s)
	case s != s.Masked():
		return setting.Invalid("subnet", "%s has bits set behind its mask, want %s", s, s.Masked())
	case s.Bits() < 8 || s.Bits() > 28:
		return setting.Invalid("subnet", "%s has %d bits, want from /8 to /28", s, s.Bits())
	case s.Addr().IsLoopback() || s.Addr().IsMulticast() || s.Addr().IsLinkLocalUnicast() || s.Addr().IsUnspecified():
		return setting.Invalid("subnet", "%s is a special range; take a private one such as 10.87.0.0/16", s)
	}
	for _, a := range []struct{ key, addr string }{
		{"httpAddr", c.HTTPAddr}, {"tlsAddr", c.TLSAddr}, {"kubeAddr", c.KubeAddr}, {"sshAddr", c.SSHAddr}, {"metricsAddr", c.MetricsAddr},
	} {
		if ap, err := netip.ParseAddrPort(a.addr); err == nil && s.Contains(ap.Addr().Unmap()) {
			return setting.Invalid("subnet", "%s overlaps %s (%s)", s, a.key, a.addr)
		}
	}
	return c.checkSubnet6()
}

// checkReach is of what the sandboxes meet beyond their own subnet.
func (c *Config) checkReach() error {
	s := c.Subnet
	for _, r := range c.WebhookAllow {
		if r != r.Masked() {
			return setting.Invalid("webhookAllow", "%s has bits set behind its mask, want %s", r, r.Masked())
		}
	}
	for _, r := range c.Reachable {
		if r != r.Masked() {
			return setting.Invalid("reachable", "%s has bits set behind its mask, want %s", r, r.Masked())
		}
		if r.Overlaps(s) || (c.Subnet6.IsValid() && r.Overlaps(c.Subnet6)) {
			return setting.Invalid("reachable", "%s overlaps the sandboxes' own subnet", r)
		}
	}
	if c.SpareNetworks < 0 || c.SpareNetworks > maxSpareNetworks {
		return setting.Invalid("spareNetworks", "%d is out of range, want 0 to %d", c.SpareNetworks, maxSpareNetworks)
	}
	for _, z := range c.InternalZones {
		if z != "." && !dnsName.MatchString(z) {
			return setting.Invalid("internalZones", "%q is not a zone such as corp.example, in lower case and without a final dot, nor \".\" for all names", z)
		}
	}
	for _, r := range c.DNSResolvers {
		if s.Contains(r.Unmap()) {
			return setting.Invalid("dnsResolvers", "%s lies in the sandboxes' own subnet %s", r, s)
		}
	}
	return nil
}

// maxSpareNetworks bounds the networks prepared in advance.
const maxSpareNetworks = 1000

// checkSubnet6 requires space for the 32 bits of an IPv4 address.
func (c *Config) checkSubnet6() error {
	s := c.Subnet6
	switch {
	case !s.IsValid():
		return nil
	case !s.Addr().Is6() || s.Addr().Is4In6():
		return setting.Invalid("subnet6", "%s is not an IPv6 subnet such as fd87::/64", s)
	case s != s.Masked():
		return setting.Invalid("subnet6", "%s has bits set behind its mask, want %s", s, s.Masked())
	case s.Bits() > 96:
		return setting.Invalid("subnet6", "%s has %d bits, want 96 or fewer", s, s.Bits())
	case s.Addr().IsLoopback() || s.Addr().IsMulticast() || s.Addr().IsLinkLocalUnicast() || s.Addr().IsUnspecified():
		return setting.Invalid("subnet6", "%s is a special range; take one such as fd87::/64", s)
	}
	return nil
}

// CheckHost finds an interface of this machine in the sandboxes' subnet, other
// than our own bridge, whose traffic the bridge would take away.
func (c *Config) CheckHost() error {
	links, err := net.Interfaces()
	if err != nil {
		return fmt.Errorf("list network interfaces: %w", err)
	}
	for _, l := range links {
		if l.Name == c.BridgeName {
			continue
		}
		addrs, err := l.Addrs()
		if err != nil {
			continue // it went away meanwhile
		}
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err == nil && p.Overlaps(c.Subnet) {
				return setting.Invalid("subnet", "%s overlaps %s of interface %s; choose another with --subnet", c.Subnet, p, l.Name)
			}
			if err == nil && c.Subnet6.IsValid() && p.Overlaps(c.Subnet6) {
				return setting.Invalid("subnet6", "%s overlaps %s of interface %s; choose another with --subnet6", c.Subnet6, p, l.Name)
			}
		}
	}
	return nil
}
