package netdev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ensureBridge creates the bridge, with a hardware address independent of its ports, or corrects an
// existing one.
func (n *Network) ensureBridge() (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = n.cfg.Bridge, n.cfg.MTU, MACOf(n.cfg.Gateway)
	err := n.host.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("create bridge %s: %w", n.cfg.Bridge, err)
	}
	link, err := n.host.LinkByName(n.cfg.Bridge)
	if err != nil {
		return nil, fmt.Errorf("find bridge %s: %w", n.cfg.Bridge, err)
	}
	if link.Type() != "bridge" {
		return nil, fmt.Errorf("link %s is a %s, not a bridge; choose another name", n.cfg.Bridge, link.Type())
	}
	if err := prepareIPv6(n.cfg.Bridge, n.cfg.Subnet6.IsValid()); err != nil {
		return nil, err
	}
	address := prefixNet(netip.PrefixFrom(n.cfg.Gateway, n.cfg.Subnet.Bits()))
	if err := n.replaceBridgeAddress(link, netlink.FAMILY_V4, address); err != nil {
		return nil, err
	}
	if n.cfg.Subnet6.IsValid() {
		address := prefixNet(netip.PrefixFrom(n.Gateway6(), n.cfg.Subnet6.Bits()))
		if err := n.replaceBridgeAddress(link, netlink.FAMILY_V6, address); err != nil {
			return nil, err
		}
	}
	if err := n.host.LinkSetUp(link); err != nil {
		return nil, fmt.Errorf("bring up bridge %s: %w", n.cfg.Bridge, err)
	}
	if n.cfg.Subnet6.IsValid() {
		if err := n.host.RouteReplace(localRoute(link, n.Gateway6())); err != nil {
			return nil, fmt.Errorf("add local route of %s: %w", n.Gateway6(), err)
		}
	}
	return link, nil
}

func (n *Network) replaceBridgeAddress(link netlink.Link, family int, want *net.IPNet) error {
	have, err := consistentList(func() ([]netlink.Addr, error) { return n.host.AddrList(link, family) })
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", n.cfg.Bridge, err)
	}
	found := false
	for i := range have {
		if have[i].IPNet.String() == want.String() {
			found = true
			continue
		}
		if err := n.host.AddrDel(link, &have[i]); err != nil {
			return fmt.Errorf("remove address %s from %s: %w", have[i].IPNet, n.cfg.Bridge, err)
		}
		if a, ok := netip.AddrFromSlice(have[i].IP); ok && a.Is6() {
			_ = n.host.RouteDel(localRoute(link, a)) // absent on bridges of older versions
		}
	}
	if found {
		return nil
	}
	if err := n.host.AddrAdd(link, addressOf(want)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add address %s to %s: %w", want, n.cfg.Bridge, err)
	}
	return nil
}

// localRoute makes the host answer for an IPv6 address of the bridge. The kernel adds such a route
// only after it has noticed a bridge port that is up; an earlier connection would hang.
func localRoute(link netlink.Link, addr netip.Addr) *netlink.Route {
	return &netlink.Route{
		LinkIndex: link.Attrs().Index, Dst: prefixNet(netip.PrefixFrom(addr, addr.BitLen())),
		Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL,
	}
}

// addressOf is an address that is usable at once: no other host can have an IPv6 address of ours,
// so duplicate detection is off.
func addressOf(n *net.IPNet) *netlink.Addr {
	a := &netlink.Addr{IPNet: n}
	if n.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	return a
}

// allowForwarding enables forwarding between the bridge and links with a default route only: the
// host does not become a router for its other networks.
func (n *Network) allowForwarding(ctx context.Context) error {
	uplinks, err := n.linksWithDefaultRoute(netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, name := range append(uplinks, n.cfg.Bridge) {
		if err := writeSysctl("ipv4", name, "forwarding", "1"); err != nil {
			n.log.WarnContext(ctx, "forwarding not enabled; sandboxes may lack egress", "link", name, "error", err)
		}
	}
	return n.allowForwarding6(ctx)
}

func (n *Network) linksWithDefaultRoute(family int) (names []string, err error) {
	routes, err := consistentList(func() ([]netlink.Route, error) { return n.host.RouteList(nil, family) })
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst != nil {
			if ones, _ := r.Dst.Mask.Size(); ones != 0 {
				continue
			}
		}
		if link, err := n.host.LinkByIndex(r.LinkIndex); err == nil {
			names = append(names, link.Attrs().Name)
		}
	}
	return names, nil
}

// writeSysctl sets a value of a link in the network namespace of the calling thread.
func writeSysctl(family, link, key, value string) error {
	if have, err := readSysctl(family, link, key); err == nil && have == value {
		return nil
	}
	path := sysctlPath(family, link, key)
	if err := os.WriteFile(path, []byte(value), 0o644); err != nil {
		return fmt.Errorf("set %s: %w", path, err)
	}
	return nil
}

func readSysctl(family, link, key string) (string, error) {
	have, err := os.ReadFile(sysctlPath(family, link, key))
	if err != nil {
		return "", fmt.Errorf("read setting of %s: %w", link, err)
	}
	return strings.TrimSpace(string(have)), nil
}

func sysctlPath(family, link, key string) string {
	return filepath.Join("/proc/sys/net", family, "conf", link, key)
}

func prefixNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
