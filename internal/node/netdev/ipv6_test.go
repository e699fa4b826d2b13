package netdev

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

// withSubnet6 gives a test's network its own IPv6 range.
func withSubnet6(c *Config) {
	c.Subnet6 = netip.MustParsePrefix(fmt.Sprintf("fd%02x:%x:%x::/64", rand.IntN(256), rand.IntN(65536), rand.IntN(65536)))
}

// reach connects from a namespace, or from the host if path is empty, and reads a line.
func reach(t *testing.T, path string, to netip.AddrPort, limit time.Duration) error {
	t.Helper()
	try := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		for {
			c, err := (&net.Dialer{}).DialContext(ctx, "tcp", to.String())
			if errors.Is(err, unix.EHOSTUNREACH) && lifecycle.Sleep(ctx, 10*time.Millisecond) {
				continue // the kernel adds the route to an address a moment after the address
			}
			if err != nil {
				return err
			}
			return c.Close()
		}
	}
	if path == "" {
		return try()
	}
	return inside(t, path, try)
}

func serve(t *testing.T, address string) error {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
	if err == nil {
		t.Cleanup(func() { _ = l.Close() })
	}
	return err
}

func TestReachabilityIPv6(t *testing.T) {
	for name, spares := range map[string]int{"new": 0, "spare": 2} {
		t.Run(name, func(t *testing.T) {
			n := testNetwork(t, withSubnet6, func(c *Config) {
				c.Spares, c.Resolvers = spares, []netip.Addr{c.Subnet6.Masked().Addr().Next()}
			})
			fill(t, n)
			a, b := endpoint6(n, 1), endpoint6(n, 2)
			for _, ep := range []Endpoint{a, b} {
				at, err := n.Attach(t.Context(), ep)
				must(t, err)
				must(t, inside(t, at.NetnsPath, func() error { return serve(t, "[::]:8080") }))
			}
			for _, port := range []string{"18080", "53"} {
				must(t, serve(t, net.JoinHostPort(n.Gateway6().String(), port)))
			}
			from := n.NetnsPath(a.ID)
			for name, c := range map[string]struct {
				path string
				to   netip.AddrPort
				want bool
			}{
				"host to sandbox":      {"", netip.AddrPortFrom(a.Address6, 8080), true},
				"host to sandbox, v4":  {"", netip.AddrPortFrom(a.Address, 8080), true},
				"host to itself":       {"", netip.AddrPortFrom(n.Gateway6(), 18080), true},
				"sandbox to itself":    {from, netip.AddrPortFrom(a.Address6, 8080), true},
				"sandbox to resolver":  {from, netip.AddrPortFrom(n.Gateway6(), 53), true},
				"sandbox to host":      {from, netip.AddrPortFrom(n.Gateway6(), 18080), false},
				"sandbox to neighbour": {from, netip.AddrPortFrom(b.Address6, 8080), false},
				"sandbox to private":   {from, netip.MustParseAddrPort("[fd99::1]:80"), false},
			} {
				limit := soon
				if !c.want {
					limit = never
				}
				if err := reach(t, c.path, c.to, limit); (err == nil) != c.want {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
}

// A sandbox has exactly its configured addresses, at once, and learns no routes.
func TestAddressesInside(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		six    bool
	}{
		"IPv4 only":               {func(*Config) {}, false},
		"IPv6 in the network":     {withSubnet6, false},
		"IPv6 of the sandbox too": {withSubnet6, true},
	} {
		for _, spares := range []int{0, 1} {
			t.Run(fmt.Sprintf("%s, %d spares", name, spares), func(t *testing.T) {
				n := testNetwork(t, c.change, func(cfg *Config) { cfg.Spares = spares })
				fill(t, n)
				ep := endpoint(n, 1)
				want := map[string]bool{netip.PrefixFrom(ep.Address, n.cfg.Subnet.Bits()).String(): true}
				if c.six {
					ep = endpoint6(n, 1)
					want[netip.PrefixFrom(ep.Address6, n.cfg.Subnet6.Bits()).String()] = true
				}
				at, err := n.Attach(t.Context(), ep)
				must(t, err)
				must(t, inside(t, at.NetnsPath, func() error { return checkInside(t, at, want, c.six) }))
				must(t, inside(t, at.NetnsPath, func() error { return checkTakenOver(t) }))
			})
		}
	}
}

func checkInside(t *testing.T, at Attachment, want map[string]bool, six bool) error {
	t.Helper()
	link, err := netlink.LinkByName(peerName)
	if err != nil {
		return err
	}
	if got := link.Attrs().HardwareAddr.String(); got != at.MAC.String() {
		t.Errorf("hardware address %s, want %s", got, at.MAC)
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if !want[a.IPNet.String()] {
			t.Errorf("has address %s", a.IPNet)
		}
		delete(want, a.IPNet.String())
	}
	for a := range want {
		t.Errorf("lacks address %s", a)
	}
	routes, err := netlink.RouteList(link, netlink.FAMILY_V6)
	if err != nil {
		return err
	}
	if got := len(routes) > 0; got != six {
		t.Errorf("IPv6 routes %v", routes)
	}
	off, err := readSysctl("ipv6", peerName, "disable_ipv6")
	if err != nil {
		return err
	}
	if (off == "0") != six {
		t.Errorf("disable_ipv6 = %s", off)
	}
	if six {
		for _, key := range []string{"accept_ra", "accept_dad", "autoconf", "accept_redirects"} {
			if got, err := readSysctl("ipv6", peerName, key); err != nil || got != "0" {
				t.Errorf("%s = %q, %v", key, got, err)
			}
		}
	}
	return nil
}

// checkTakenOver removes the addresses from the kernel, as gVisor does before it answers for them.
// The kernel must no longer answer, or it would reset gVisor's connections.
func checkTakenOver(t *testing.T) error {
	t.Helper()
	link, err := netlink.LinkByName(peerName)
	if err != nil {
		return err
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	for i := range addrs {
		if err := netlink.AddrDel(link, &addrs[i]); err != nil {
			return err
		}
	}
	local := &netlink.Route{LinkIndex: link.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL}
	left, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, local, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		t.Errorf("the kernel still answers for %v", left)
	}
	return nil
}

func TestAttachRefusesForeignIPv6(t *testing.T) {
	n := testNetwork(t, withSubnet6)
	ep := endpoint6(n, 1)
	ep.Address6 = netip.MustParseAddr("fe80::1")
	if _, err := n.Attach(t.Context(), ep); err == nil {
		t.Error("an address outside the range was accepted")
	}
	if ids, err := n.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("List = %v, %v", ids, err)
	}
}
