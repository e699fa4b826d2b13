package netdev

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
)

// gateway6 is the bridge's IPv6 address: the first of the range, which belongs to no IPv4 address
// of a sandbox. It is the zero value without IPv6.
func gateway6(cfg Config) netip.Addr {
	if !cfg.Subnet6.IsValid() {
		return netip.Addr{}
	}
	return cfg.Subnet6.Masked().Addr().Next()
}

// fitsIPv4 reports whether a range can have an IPv4 address in its low bits.
func fitsIPv4(p netip.Prefix) bool {
	return p.Addr().Is6() && !p.Addr().Is4In6() && p.Bits() <= 96
}

// ipv4Of is the IPv4 address of the sandbox with an address; zero if no sandbox can have it.
func (n *Network) ipv4Of(addr netip.Addr) netip.Addr {
	if addr.Is6() && n.cfg.Subnet6.IsValid() && n.cfg.Subnet6.Contains(addr) {
		a := addr.As16()
		addr = netip.AddrFrom4([4]byte(a[12:]))
	}
	if !n.cfg.Subnet.Contains(addr) {
		return netip.Addr{}
	}
	return addr
}

// prepareIPv6 restricts a link, or all later links of the calling thread's namespace ("default"),
// to IPv6 addresses that we configure, usable at once: no link-local ones, no duplicate detection,
// no router advertisements. Without IPv6 there is none at all.
func prepareIPv6(link string, on bool) error {
	values := [][2]string{{"disable_ipv6", "1"}}
	if on {
		values = [][2]string{
			{"addr_gen_mode", "1"}, // none
			{"accept_ra", "0"},
			{"autoconf", "0"},
			{"accept_redirects", "0"},
			{"router_solicitations", "0"},
			{"accept_dad", "0"},
			{"dad_transmits", "0"},
			{"disable_ipv6", "0"},
		}
	}
	for _, v := range values {
		err := writeSysctl("ipv6", link, v[0], v[1])
		if err != nil && (on || !errors.Is(err, os.ErrNotExist)) {
			return err
		}
	}
	return nil
}

// allowForwarding6 enables IPv6 forwarding between the bridge and the links with a default route.
// Older kernels can forward between all links or none.
func (n *Network) allowForwarding6(ctx context.Context) error {
	if !n.cfg.Subnet6.IsValid() {
		return nil
	}
	uplinks, err := n.linksWithDefaultRoute(netlink.FAMILY_V6)
	if err != nil {
		return err
	}
	for _, name := range append(uplinks, n.cfg.Bridge) {
		err := writeSysctl("ipv6", name, "force_forwarding", "1")
		if errors.Is(err, os.ErrNotExist) {
			err = forwardAll6(uplinks)
		}
		if err != nil {
			n.log.WarnContext(ctx, "IPv6 forwarding not enabled; sandboxes may lack egress", "link", name, "error", err)
		}
	}
	return nil
}

// forwardAll6 forwards between all links. A forwarding host ignores router advertisements unless
// configured otherwise, and could lose its own default route.
func forwardAll6(uplinks []string) error {
	for _, name := range uplinks {
		have, err := readSysctl("ipv6", name, "accept_ra")
		if err != nil {
			return err
		}
		if have == "1" {
			if err := writeSysctl("ipv6", name, "accept_ra", "2"); err != nil {
				return err
			}
		}
	}
	return writeSysctl("ipv6", "all", "forwarding", "1")
}

func (n *Network) check6(ep Endpoint) error {
	if ep.Address6.IsValid() && !n.cfg.Subnet6.Contains(ep.Address6) {
		return fmt.Errorf("address %s is not in the network's IPv6 range %s", ep.Address6, n.cfg.Subnet6)
	}
	return nil
}
