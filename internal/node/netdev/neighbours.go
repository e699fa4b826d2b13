package netdev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Neighbour is an address that the bridge knows.
type Neighbour struct {
	Address netip.Addr
	// MAC is empty where nobody answered.
	MAC net.HardwareAddr
	// State is the kernel's word: permanent, reachable, stale, delay, probe, noarp, incomplete or failed.
	State string
	// Port is the host link behind which the MAC is; empty where there is none, so that nobody has
	// the address any more.
	Port string
}

// Neighbours lists the IPv4 and IPv6 addresses that the bridge knows. No bridge, no neighbours.
func (n *Network) Neighbours(ctx context.Context) ([]Neighbour, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	bridge, err := n.host.LinkByName(n.cfg.Bridge)
	if missing(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("find bridge %s: %w", n.cfg.Bridge, err)
	}
	ports, err := n.portsByMAC(bridge.Attrs().Index)
	if err != nil {
		return nil, err
	}
	var found []Neighbour
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		entries, err := consistentList(func() ([]netlink.Neigh, error) { return n.host.NeighList(bridge.Attrs().Index, family) })
		if err != nil {
			return nil, fmt.Errorf("list neighbours: %w", err)
		}
		for _, e := range entries {
			addr, ok := netip.AddrFromSlice(e.IP)
			if !ok || e.IP.IsMulticast() {
				continue
			}
			found = append(found, Neighbour{
				Address: addr.Unmap(), MAC: e.HardwareAddr, State: stateName(e.State), Port: ports[e.HardwareAddr.String()],
			})
		}
	}
	slices.SortFunc(found, func(a, b Neighbour) int { return a.Address.Compare(b.Address) })
	return found, nil
}

// portsByMAC maps hardware addresses to the names of the bridge's ports that they are behind.
func (n *Network) portsByMAC(bridge int) (map[string]string, error) {
	links, err := consistentList(n.host.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	names := map[int]string{}
	for _, l := range links {
		if l.Attrs().MasterIndex == bridge {
			names[l.Attrs().Index] = l.Attrs().Name
		}
	}
	entries, err := consistentList(func() ([]netlink.Neigh, error) { return n.host.NeighList(0, unix.AF_BRIDGE) })
	if err != nil {
		return nil, fmt.Errorf("list forwarding entries: %w", err)
	}
	ports := map[string]string{}
	for _, e := range entries {
		if name := names[e.LinkIndex]; name != "" && behindPort(&e) {
			ports[e.HardwareAddr.String()] = name
		}
	}
	return ports, nil
}

// maxListAttempts is how often a list is asked for that changes while the kernel makes it.
const maxListAttempts = 50

// whole asks for a list until it is of one moment; if it never is, the error says so, and the
// list must not be taken for all that there is.
func consistentList[T any](list func() ([]T, error)) (all []T, err error) {
	for range maxListAttempts {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return all, err
}

// behindPort tells whether a forwarding entry is of somebody behind the port. The port's own
// configureAddresses is permanent, and entries of the device itself, not of the bridge, are others' matter.
func behindPort(e *netlink.Neigh) bool {
	return e.MasterIndex != 0 && e.State&netlink.NUD_PERMANENT == 0
}

// InUse names the host link behind which somebody has an address on the bridge; empty means
// nobody. It asks for this one address, not for all; neighbours that nobody is behind do not count.
func (n *Network) InUse(ctx context.Context, addr netip.Addr) (by string, err error) {
	if err := ctx.Err(); err != nil {
		return "", fmt.Errorf("look for %s on the bridge: %w", addr, err)
	}
	bridge, err := n.host.LinkByName(n.cfg.Bridge)
	if missing(err) {
		return "", nil
	} else if err != nil {
		return "", fmt.Errorf("find bridge %s: %w", n.cfg.Bridge, err)
	}
	var suspects []net.HardwareAddr
	entry, err := getNeigh(neighbourRequest(bridge, addr))
	if err != nil {
		return "", fmt.Errorf("ask for neighbour %s: %w", addr, err)
	}
	if entry != nil && len(entry.HardwareAddr) > 0 {
		suspects = append(suspects, entry.HardwareAddr)
	}
	if v4 := n.ipv4Of(addr); v4.IsValid() { // ours, although somebody flushed the neighbours
		suspects = append(suspects, MACOf(v4))
	}
	for _, mac := range suspects {
		if by, err = n.portOfMAC(bridge, mac); err != nil || by != "" {
			return by, err
		}
	}
	return "", nil
}

func (n *Network) portOfMAC(bridge netlink.Link, mac net.HardwareAddr) (string, error) {
	entry, err := getNeigh(forwardingRequest(bridge, mac))
	if err != nil {
		return "", fmt.Errorf("ask for port of %s: %w", mac, err)
	}
	if entry == nil || !behindPort(entry) {
		return "", nil
	}
	link, err := n.host.LinkByIndex(entry.LinkIndex)
	if missing(err) {
		return "", nil
	} else if err != nil {
		return "", fmt.Errorf("find port of %s: %w", mac, err)
	}
	return link.Attrs().Name, nil
}

// portOf is a forwarding entry that neither ages nor moves to another port.
func portOf(link netlink.Link, mac net.HardwareAddr) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: link.Attrs().Index, Family: unix.AF_BRIDGE, State: netlink.NUD_NOARP,
		Flags: netlink.NTF_MASTER | netlink.NTF_STICKY, HardwareAddr: mac,
	}
}

func neighbourRequest(bridge netlink.Link, addr netip.Addr) *nl.NetlinkRequest {
	family := uint8(unix.AF_INET)
	if addr.Is6() {
		family = unix.AF_INET6
	}
	q := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, 0)
	q.AddData(&netlink.Ndmsg{Family: family, Index: uint32(bridge.Attrs().Index)})
	q.AddData(nl.NewRtAttr(netlink.NDA_DST, addr.AsSlice()))
	return q
}

func forwardingRequest(bridge netlink.Link, mac net.HardwareAddr) *nl.NetlinkRequest {
	q := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, 0)
	q.AddData(&netlink.Ndmsg{Family: unix.AF_BRIDGE})
	q.AddData(nl.NewRtAttr(netlink.NDA_LLADDR, mac))
	q.AddData(nl.NewRtAttr(netlink.NDA_MASTER, nl.Uint32Attr(uint32(bridge.Attrs().Index))))
	return q
}

// getNeigh asks for one entry; nil means that there is none.
func getNeigh(q *nl.NetlinkRequest) (*netlink.Neigh, error) {
	messages, err := q.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil //nolint:nilnil // no entry is an answer
	} else if err != nil {
		return nil, err
	}
	if len(messages) != 1 {
		return nil, fmt.Errorf("%d answers, want 1", len(messages))
	}
	return netlink.NeighDeserialize(messages[0])
}

var stateNames = []struct {
	bit  int
	name string
}{
	{netlink.NUD_INCOMPLETE, "incomplete"},
	{netlink.NUD_REACHABLE, "reachable"},
	{netlink.NUD_STALE, "stale"},
	{netlink.NUD_DELAY, "delay"},
	{netlink.NUD_PROBE, "probe"},
	{netlink.NUD_FAILED, "failed"},
	{netlink.NUD_NOARP, "noarp"},
	{netlink.NUD_PERMANENT, "permanent"},
}

func stateName(state int) string {
	var names []string
	for _, s := range stateNames {
		if state&s.bit != 0 {
			names = append(names, s.name)
		}
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, "+")
}
