package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// preparedNetns is an unnamed network namespace with a veth pair into the bridge. Only its open
// files keep it: the kernel removes it, links included, with the process.
type preparedNetns struct {
	host   *netlink.Veth   // down, a port of the bridge, isolated
	inside *netlink.Handle // netlink in the namespace
	peer   netlink.Link    // the inner end, down
	ns     *os.File        // the namespace
}

// prepareNetns creates a namespace whose host link has the given name.
func (n *Network) prepareNetns(hostLink string) (*preparedNetns, error) {
	bridge := n.bridgeLink()
	if bridge == nil {
		return nil, errors.New("network is not open")
	}
	inside, ns, err := n.newNamespace()
	if err != nil {
		return nil, err
	}
	r := &preparedNetns{inside: inside, ns: ns}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.MasterIndex = hostLink, n.cfg.MTU, bridge.Attrs().Index
	r.host = &netlink.Veth{
		LinkAttrs: attrs, PeerName: peerName, PeerMTU: uint32(n.cfg.MTU), PeerNamespace: netlink.NsFd(int(ns.Fd())),
	}
	if err := n.host.LinkAdd(r.host); err != nil {
		r.close()
		err = fmt.Errorf("create link %s: %w", hostLink, err)
		if !errors.Is(err, unix.EEXIST) { // created, but not a port of the bridge
			err = errors.Join(err, n.removeLink(hostLink))
		}
		return nil, err
	}
	if err := n.configureCommon(r); err != nil {
		r.close()
		return nil, errors.Join(err, n.removeLink(hostLink))
	}
	return r, nil
}

// configureCommon configures what is the same for all endpoints.
func (n *Network) configureCommon(r *preparedNetns) error {
	if err := n.host.LinkSetIsolated(r.host, true); err != nil {
		return fmt.Errorf("isolate %s: %w", r.host.Name, err)
	}
	lo, err := r.inside.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	if err := r.inside.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring up loopback: %w", err)
	}
	if r.peer, err = r.inside.LinkByName(peerName); err != nil {
		return fmt.Errorf("find %s: %w", peerName, err)
	}
	return nil
}

// close closes the files. A namespace with a name or a process stays.
func (r *preparedNetns) close() {
	r.inside.Close()
	_ = r.ns.Close()
}

// configureEndpoint gives a namespace to an endpoint: names, addresses, neighbours, rules. Parts
// may exist already (EEXIST) under the endpoint's names; the caller undoes a partial failure.
func (n *Network) configureEndpoint(r *preparedNetns, ep Endpoint) error {
	if name := n.HostLink(ep.ID); r.host.Name != name {
		if err := n.host.LinkSetName(r.host, name); err != nil {
			return fmt.Errorf("rename link %s to %s: %w", r.host.Name, name, err)
		}
		r.host.Name = name
	}
	if err := bindNamespace(r.ns, n.NetnsPath(ep.ID)); err != nil {
		return err
	}
	if n.cfg.Subnet6.IsValid() && !ep.Address6.IsValid() {
		if err := inNamespace(r.ns, func() error { return prepareIPv6(peerName, false) }); err != nil {
			return err
		}
	}
	if err := n.configureAddresses(r, ep); err != nil {
		return err
	}
	return n.finishHostSide(r.host, ep)
}

// configureAddresses sets the inner end's addresses and default routes.
func (n *Network) configureAddresses(r *preparedNetns, ep Endpoint) error {
	if err := r.inside.LinkSetHardwareAddr(r.peer, MACOf(ep.Address)); err != nil {
		return fmt.Errorf("set hardware address: %w", err)
	}
	places := []netip.Prefix{netip.PrefixFrom(ep.Address, n.cfg.Subnet.Bits())}
	gateways := []netip.Addr{n.cfg.Gateway}
	if ep.Address6.IsValid() {
		places = append(places, netip.PrefixFrom(ep.Address6, n.cfg.Subnet6.Bits()))
		gateways = append(gateways, n.Gateway6())
	}
	// Up first: when a link comes up without enough memory for routes, the kernel silently drops
	// its IPv6 addresses. For an address that is added later it waits or returns an error.
	if err := r.inside.LinkSetUp(r.peer); err != nil {
		return fmt.Errorf("bring up %s: %w", peerName, err)
	}
	for _, p := range places {
		if err := r.inside.AddrAdd(r.peer, addressOf(prefixNet(p))); err != nil {
			return fmt.Errorf("add address %s: %w", p, err)
		}
	}
	for _, g := range gateways {
		if err := r.inside.NeighSet(permanent(r.peer, g, n.cfg.Gateway)); err != nil {
			return fmt.Errorf("set neighbour %s: %w", g, err)
		}
		if err := r.inside.RouteAdd(&netlink.Route{LinkIndex: r.peer.Attrs().Index, Gw: g.AsSlice()}); err != nil {
			return fmt.Errorf("add default route by %s: %w", g, err)
		}
	}
	return nil
}

// permanent is a neighbour entry that discovery does not override: the address has the hardware
// address that belongs to an IPv4 address.
func permanent(link netlink.Link, addr, v4 netip.Addr) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: addr.AsSlice(), HardwareAddr: MACOf(v4),
	}
}
