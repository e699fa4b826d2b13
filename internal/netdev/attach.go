package netdev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Attach gives an endpoint its namespace with an interface, address and default route. What
// an earlier, unfinished or other attachment of the ID left is replaced, so nothing may run
// in the namespace yet; for what runs there is [Network.Adopt].
func (n *Network) Attach(ctx context.Context, ep Endpoint) (Attachment, error) {
	if err := ctx.Err(); err != nil {
		return Attachment{}, fmt.Errorf("attach %s: %w", ep.ID, err)
	}
	if !n.cfg.Subnet.Contains(ep.Address) {
		return Attachment{}, fmt.Errorf("attach %s: address %s is not in %s", ep.ID, ep.Address, n.cfg.Subnet)
	}
	if _, err := os.Lstat(n.NetnsPath(ep.ID)); err == nil {
		if err := n.Detach(ctx, ep); err != nil {
			return Attachment{}, err
		}
	}
	err := n.build(ep)
	if errors.Is(err, unix.EEXIST) { // a link outlived its namespace's name
		if err = n.Detach(ctx, ep); err == nil {
			err = n.build(ep)
		}
	}
	if err != nil {
		return Attachment{}, fmt.Errorf("attach %s: %w", ep.ID, err)
	}
	return Attachment{NetnsPath: n.NetnsPath(ep.ID), HostLink: n.HostLink(ep.ID), MAC: MACOf(ep.Address)}, nil
}

// Adopt corrects the host's side of an attachment in use: neighbour, isolation and rules. It
// fails where the link is gone.
func (n *Network) Adopt(ctx context.Context, ep Endpoint) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("adopt attachment of %s: %w", ep.ID, err)
	}
	link, err := n.host.LinkByName(n.HostLink(ep.ID))
	if err != nil {
		return fmt.Errorf("adopt attachment of %s: %w", ep.ID, err)
	}
	if err := n.finishHostSide(link, ep); err != nil {
		return fmt.Errorf("adopt attachment of %s: %w", ep.ID, err)
	}
	return nil
}

// Detach removes all that Attach made, in whatever state it is; the address may be the zero
// value where it is not known. Nothing left is success.
func (n *Network) Detach(_ context.Context, ep Endpoint) error {
	var failures []error
	path := n.NetnsPath(ep.ID)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		failures = append(failures, fmt.Errorf("unmount %s: %w", path, err))
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		failures = append(failures, fmt.Errorf("remove %s: %w", path, err))
	}
	if err := n.removeLink(n.HostLink(ep.ID)); err != nil {
		failures = append(failures, err)
	}
	if err := n.rules.forget(n.HostLink(ep.ID), ep.Address); err != nil {
		failures = append(failures, err)
	}
	if err := n.removeNeighbour(ep.Address); err != nil {
		failures = append(failures, err)
	}
	if err := n.Cut(ep.Address); err != nil {
		failures = append(failures, err)
	}
	if err := errors.Join(failures...); err != nil {
		return fmt.Errorf("detach %s: %w", ep.ID, err)
	}
	return nil
}

// Cut ends the machine's TCP connections to an address at once, since nobody is there any more
// to answer for it and they would wait for minutes. None is success, and so is a kernel that
// cannot end them.
func (n *Network) Cut(addr netip.Addr) error {
	if !addr.IsValid() {
		return nil
	}
	sockets, err := n.host.SocketDiagTCP(unix.AF_INET)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	} else if err != nil {
		return fmt.Errorf("list connections to %s: %w", addr, err)
	}
	for _, s := range sockets {
		if !s.ID.Destination.Equal(addr.AsSlice()) {
			continue
		}
		local := &net.TCPAddr{IP: s.ID.Source, Port: int(s.ID.SourcePort)}
		remote := &net.TCPAddr{IP: s.ID.Destination, Port: int(s.ID.DestinationPort)}
		err := n.host.SocketDestroy(local, remote)
		if err != nil && !missing(err) && !errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("end connection to %s: %w", remote, err)
		}
	}
	return nil
}

func (n *Network) removeLink(name string) error {
	link, err := n.host.LinkByName(name)
	if missing(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("find link %s: %w", name, err)
	}
	if err := n.host.LinkDel(link); err != nil && !missing(err) {
		return fmt.Errorf("remove link %s: %w", name, err)
	}
	return nil
}

func (n *Network) removeNeighbour(addr netip.Addr) error {
	bridge := n.bridgeLink()
	if !addr.IsValid() || bridge == nil {
		return nil
	}
	err := n.host.NeighDel(&netlink.Neigh{LinkIndex: bridge.Attrs().Index, IP: addr.AsSlice(), HardwareAddr: MACOf(addr)})
	if err != nil && !missing(err) {
		return fmt.Errorf("remove neighbour %s: %w", addr, err)
	}
	return nil
}

func (n *Network) bridgeLink() netlink.Link {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.bridge
}

// build makes namespace and links; the caller undoes on failure.
func (n *Network) build(ep Endpoint) error {
	bridge := n.bridgeLink()
	if bridge == nil {
		return errors.New("the network is not open")
	}
	inside, ns, err := n.newNamespace(n.NetnsPath(ep.ID))
	if err != nil {
		return err
	}
	defer inside.Close()
	defer func() { _ = ns.Close() }()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.MasterIndex = n.HostLink(ep.ID), n.cfg.MTU, bridge.Attrs().Index
	veth := &netlink.Veth{
		LinkAttrs: attrs, PeerName: peerName, PeerMTU: uint32(n.cfg.MTU),
		PeerHardwareAddr: MACOf(ep.Address), PeerNamespace: netlink.NsFd(int(ns.Fd())),
	}
	if err := n.host.LinkAdd(veth); err != nil {
		return fmt.Errorf("make link %s: %w", attrs.Name, err)
	}
	if err := n.finishHostSide(veth, ep); err != nil {
		return err
	}
	return n.configureInside(inside, ep)
}

// finishHostSide isolates the port and tells bridge and rules who is behind it. A port that
// is up but not yet in the rules can send nothing.
func (n *Network) finishHostSide(link netlink.Link, ep Endpoint) error {
	name := link.Attrs().Name
	if err := n.host.LinkSetIsolated(link, true); err != nil {
		return fmt.Errorf("isolate %s: %w", name, err)
	}
	bridge := n.bridgeLink()
	if bridge == nil {
		return errors.New("the network is not open")
	}
	// A permanent neighbour, or the first dial would wait a second for ARP to be repeated.
	err := n.host.NeighSet(&netlink.Neigh{
		LinkIndex: bridge.Attrs().Index, State: netlink.NUD_PERMANENT,
		IP: ep.Address.AsSlice(), HardwareAddr: MACOf(ep.Address),
	})
	if err != nil {
		return fmt.Errorf("set neighbour %s: %w", ep.Address, err)
	}
	if err := n.rules.admit(name, ep.Address); err != nil {
		return err
	}
	if err := n.host.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring up %s: %w", name, err)
	}
	return nil
}

func (n *Network) configureInside(inside *netlink.Handle, ep Endpoint) error {
	lo, err := inside.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	if err := inside.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring up loopback: %w", err)
	}
	link, err := inside.LinkByName(peerName)
	if err != nil {
		return fmt.Errorf("find %s: %w", peerName, err)
	}
	address := prefixNet(netip.PrefixFrom(ep.Address, n.cfg.Subnet.Bits()))
	if err := inside.AddrAdd(link, &netlink.Addr{IPNet: address}); err != nil {
		return fmt.Errorf("add address %s: %w", address, err)
	}
	if err := inside.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring up %s: %w", peerName, err)
	}
	err = inside.NeighSet(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
		IP: n.cfg.Gateway.AsSlice(), HardwareAddr: MACOf(n.cfg.Gateway),
	})
	if err != nil {
		return fmt.Errorf("set neighbour %s: %w", n.cfg.Gateway, err)
	}
	if err := inside.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: n.cfg.Gateway.AsSlice()}); err != nil {
		return fmt.Errorf("add default route: %w", err)
	}
	return nil
}

// newNamespace makes a network namespace with a name, and a netlink handle inside it. It uses
// a thread of its own, which ends with it, so that no other goroutine ever runs there.
func (n *Network) newNamespace(path string) (*netlink.Handle, *os.File, error) {
	type result struct {
		handle *netlink.Handle
		ns     *os.File
		err    error
	}
	done := make(chan result)
	go func() { // received from below
		runtime.LockOSThread() // never unlocked: the thread dies with the goroutine
		handle, ns, err := enterNewNamespace(path)
		done <- result{handle, ns, err}
	}()
	r := <-done
	if r.err != nil {
		return nil, nil, fmt.Errorf("make namespace %s: %w", path, r.err)
	}
	return r.handle, r.ns, nil
}

func enterNewNamespace(path string) (*netlink.Handle, *os.File, error) {
	if err := placeholder(path); err != nil {
		return nil, nil, err
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, nil, fmt.Errorf("unshare: %w", err)
	}
	const own = "/proc/thread-self/ns/net"
	if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
		return nil, nil, fmt.Errorf("bind: %w", err)
	}
	// No IPv6 inside for now: without it no link-local addresses and no waiting for them.
	if err := writeSysctl("ipv6", "default", "disable_ipv6", "1"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, err
	}
	ns, err := os.Open(own)
	if err != nil {
		return nil, nil, fmt.Errorf("open namespace: %w", err)
	}
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open netlink inside: %w", err), ns.Close())
	}
	return handle, ns, nil
}

// placeholder makes the empty file that a namespace is bound to.
func placeholder(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|os.O_EXCL, 0o444)
	if errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
		f, err = os.OpenFile(path, os.O_CREATE|os.O_RDONLY|os.O_EXCL, 0o444)
	}
	if err != nil {
		return fmt.Errorf("make file: %w", err)
	}
	return f.Close()
}
