package netdev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ensureBridge makes the bridge, with a hardware address that does not follow its ports, or
// corrects one that exists.
func (n *Network) ensureBridge() (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = n.cfg.Bridge, n.cfg.MTU, MACOf(n.cfg.Gateway)
	err := n.host.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("make bridge %s: %w", n.cfg.Bridge, err)
	}
	link, err := n.host.LinkByName(n.cfg.Bridge)
	if err != nil {
		return nil, fmt.Errorf("find bridge %s: %w", n.cfg.Bridge, err)
	}
	if link.Type() != "bridge" {
		return nil, fmt.Errorf("link %s exists and is a %s, not a bridge; choose another name", n.cfg.Bridge, link.Type())
	}
	if err := writeSysctl("ipv6", n.cfg.Bridge, "disable_ipv6", "1"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	address := prefixNet(netip.PrefixFrom(n.cfg.Gateway, n.cfg.Subnet.Bits()))
	if err := n.replaceBridgeAddress(link, address); err != nil {
		return nil, err
	}
	if err := n.host.LinkSetUp(link); err != nil {
		return nil, fmt.Errorf("bring up bridge %s: %w", n.cfg.Bridge, err)
	}
	return link, nil
}

func (n *Network) replaceBridgeAddress(link netlink.Link, want *net.IPNet) error {
	have, err := n.host.AddrList(link, netlink.FAMILY_V4)
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
	}
	if found {
		return nil
	}
	if err := n.host.AddrAdd(link, &netlink.Addr{IPNet: want}); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add address %s to %s: %w", want, n.cfg.Bridge, err)
	}
	return nil
}

// allowForwarding lets packets pass between the bridge and the links that have a default
// route, and no others: the machine does not become a router for the rest of its networks.
func (n *Network) allowForwarding(ctx context.Context) error {
	names := []string{n.cfg.Bridge}
	routes, err := n.host.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst != nil && r.Dst.String() != "0.0.0.0/0" {
			continue
		}
		if link, err := n.host.LinkByIndex(r.LinkIndex); err == nil {
			names = append(names, link.Attrs().Name)
		}
	}
	for _, name := range names {
		if err := writeSysctl("ipv4", name, "forwarding", "1"); err != nil {
			n.log.WarnContext(ctx, "forwarding not enabled; sandboxes may lack egress", "link", name, "error", err)
		}
	}
	return nil
}

// writeSysctl sets a value of a link in the network namespace of the calling thread.
func writeSysctl(family, link, key, value string) error {
	path := filepath.Join("/proc/sys/net", family, "conf", link, key)
	if have, err := os.ReadFile(path); err == nil && len(have) > 0 && string(have[:len(have)-1]) == value {
		return nil
	}
	if err := os.WriteFile(path, []byte(value), 0o644); err != nil {
		return fmt.Errorf("set %s: %w", path, err)
	}
	return nil
}

func prefixNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
