package netdev

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/netdev/firewall"
)

// Attach gives an endpoint a namespace with an interface, addresses and default routes: a spare
// one, or a new one if there is none. It replaces an unfinished or other attachment of the ID, so
// nothing may run in the namespace yet; use [Network.Adopt] for a running one. A failure leaves
// nothing.
func (n *Network) Attach(ctx context.Context, ep Endpoint) (Attachment, error) {
	if err := ctx.Err(); err != nil {
		return Attachment{}, fmt.Errorf("attach %s: %w", ep.ID, err)
	}
	if !n.cfg.Subnet.Contains(ep.Address) {
		return Attachment{}, fmt.Errorf("attach %s: address %s is not in %s", ep.ID, ep.Address, n.cfg.Subnet)
	}
	if err := n.check6(ep); err != nil {
		return Attachment{}, fmt.Errorf("attach %s: %w", ep.ID, err)
	}
	defer n.spares.pauseRefill()()
	if _, err := os.Lstat(n.NetnsPath(ep.ID)); err == nil {
		if err := n.Detach(ctx, ep); err != nil {
			return Attachment{}, err
		}
	}
	err := n.provision(ep)
	if errors.Is(err, unix.EEXIST) { // a link without its named namespace
		if err = n.Detach(ctx, ep); err == nil {
			err = n.provision(ep)
		}
	}
	if err != nil {
		return Attachment{}, fmt.Errorf("attach %s: %w", ep.ID, errors.Join(err, n.Detach(ctx, ep)))
	}
	return Attachment{NetnsPath: n.NetnsPath(ep.ID), HostLink: n.HostLink(ep.ID), MAC: MACOf(ep.Address)}, nil
}

// provision configures a spare namespace for an endpoint, or a new one if there is no spare or its
// link was changed. The caller undoes on failure.
func (n *Network) provision(ep Endpoint) error {
	if r := n.spares.take(); r != nil {
		err := n.configureEndpoint(r, ep)
		r.close()
		if err == nil || errors.Is(err, unix.EEXIST) {
			return err
		}
		if err := errors.Join(unbindNamespace(n.NetnsPath(ep.ID)), n.removeLink(r.host.Name)); err != nil {
			return err
		}
	}
	r, err := n.prepareNetns(n.HostLink(ep.ID))
	if err != nil {
		return err
	}
	defer r.close()
	return n.configureEndpoint(r, ep)
}

// Adopt corrects the host's side of an attachment in use: neighbour, isolation and rules. It fails
// if the link does not exist.
func (n *Network) Adopt(ctx context.Context, ep Endpoint) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("adopt attachment of %s: %w", ep.ID, err)
	}
	link, err := n.host.LinkByName(n.HostLink(ep.ID))
	if err != nil {
		return fmt.Errorf("adopt attachment of %s: %w", ep.ID, err)
	}
	if err := n.host.LinkSetIsolated(link, true); err != nil {
		return fmt.Errorf("adopt attachment of %s: isolate %s: %w", ep.ID, n.HostLink(ep.ID), err)
	}
	if err := n.finishHostSide(link, ep); err != nil {
		return fmt.Errorf("adopt attachment of %s: %w", ep.ID, err)
	}
	return nil
}

// Detach removes everything that Attach created, in any state; unknown addresses may be zero.
// Nothing to remove is success. The port closes at once. While Run runs, Detach does not wait for
// the kernel to remove namespace and links.
func (n *Network) Detach(_ context.Context, ep Endpoint) error {
	failures := []error{
		n.detachLink(n.HostLink(ep.ID)),
		n.rules.Forget(n.port(ep)),
		n.removeNeighbour(ep.Address, ep.Address),
		n.removeNeighbour(ep.Address6, ep.Address),
		n.Cut(ep.Address),
		n.Cut(ep.Address6),
		// Last: the kernel then cleans up under a lock that all of the above would wait for.
		unbindNamespace(n.NetnsPath(ep.ID)),
	}
	if err := errors.Join(failures...); err != nil {
		return fmt.Errorf("detach %s: %w", ep.ID, err)
	}
	return nil
}

// Cut ends the host's TCP connections to an address at once: no host answers for it, so they would
// wait for minutes. No connection is success, and so is a kernel that cannot end them.
func (n *Network) Cut(addr netip.Addr) error {
	if !addr.IsValid() {
		return nil
	}
	family := uint8(unix.AF_INET)
	if addr.Is6() {
		family = unix.AF_INET6
	}
	sockets, err := consistentList(func() ([]*netlink.Socket, error) { return n.host.SocketDiagTCP(family) })
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	} else if err != nil {
		return fmt.Errorf("list connections to %s: %w", addr, err)
	}
	for _, s := range sockets {
		if !s.ID.Destination.Equal(addr.AsSlice()) {
			continue
		}
		if err := destroySocket(family, s.ID); err != nil && !missing(err) && !errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("end connection to %s: %w", addr, err)
		}
	}
	return nil
}

// destroySocket ends a TCP connection of this host. The library does so for IPv4 only.
func destroySocket(family uint8, id netlink.SocketID) error {
	const headerSize, addressSize = 12, 16 // of struct inet_diag_req_v2
	b := make([]byte, headerSize+2*addressSize+12)
	b[0], b[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[4:], ^uint32(0)) // any state
	binary.BigEndian.PutUint16(b[8:], id.SourcePort)
	binary.BigEndian.PutUint16(b[10:], id.DestinationPort)
	for i, ip := range []net.IP{id.Source, id.Destination} {
		if v4 := ip.To4(); family == unix.AF_INET && v4 != nil {
			ip = v4
		}
		copy(b[headerSize+i*addressSize:], ip)
	}
	rest := b[headerSize+2*addressSize:]
	binary.NativeEndian.PutUint32(rest, id.Interface)
	binary.NativeEndian.PutUint32(rest[4:], id.Cookie[0])
	binary.NativeEndian.PutUint32(rest[8:], id.Cookie[1])
	q := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	q.AddRawData(b)
	_, err := q.Execute(unix.NETLINK_INET_DIAG, 0)
	return err
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

func (n *Network) removeNeighbour(addr, v4 netip.Addr) error {
	bridge := n.bridgeLink()
	if !addr.IsValid() || !v4.IsValid() || bridge == nil {
		return nil
	}
	err := n.host.NeighDel(permanent(bridge, addr, v4))
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

// port is an endpoint's port of the bridge; without an address it has no MAC.
func (n *Network) port(ep Endpoint) firewall.Port {
	p := firewall.Port{Endpoint: ep, Link: n.HostLink(ep.ID)}
	if ep.Address.IsValid() {
		p.MAC = MACOf(ep.Address)
	}
	return p
}

// finishHostSide configures the host's end, the neighbours and the rules. A port that is up but not yet
// in the rules can send nothing.
func (n *Network) finishHostSide(link netlink.Link, ep Endpoint) error {
	name := link.Attrs().Name
	bridge := n.bridgeLink()
	if bridge == nil {
		return errors.New("network is not open")
	}
	if err := n.host.NeighSet(portOf(link, MACOf(ep.Address))); err != nil {
		return fmt.Errorf("set port of %s: %w", name, err)
	}
	for _, a := range []netip.Addr{ep.Address, ep.Address6} {
		if !a.IsValid() {
			continue
		}
		// Permanent, or the first dial would wait a second for neighbour discovery.
		if err := n.host.NeighSet(permanent(bridge, a, ep.Address)); err != nil {
			return fmt.Errorf("set neighbour %s: %w", a, err)
		}
	}
	if err := n.rules.Admit(n.port(ep)); err != nil {
		return err
	}
	if err := n.host.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring up %s: %w", name, err)
	}
	return nil
}
