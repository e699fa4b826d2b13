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

// Neighbour is an address in the bridge's neighbour table.
type Neighbour struct {
	Address netip.Addr
	// MAC is empty if no host answered.
	MAC net.HardwareAddr
	// State is the kernel's name: permanent, reachable, stale, delay, probe, noarp, incomplete or
	// failed.
	State string
	// Port is the host link with the MAC; empty if there is none, so that the address is unused.
	Port string
}

// Neighbours lists the IPv4 and IPv6 addresses in the bridge's neighbour table. Without a bridge it
// is empty.
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

// portsByMAC maps hardware addresses to the bridge's ports that have them.
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

// maxListAttempts bounds the reads of a list that changes while the kernel writes it.
const maxListAttempts = 50

// consistentList reads a list until it is of one moment. If it never is, it returns an error, and
// the list must not be taken as complete.
func consistentList[T any](list func() ([]T, error)) (all []T, err error) {
	for range maxListAttempts {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return all, err
}

// behindPort reports whether a forwarding entry belongs to a host behind the port. A port's own
// address is permanent, and entries of the device itself are not the bridge's.
func behindPort(e *netlink.Neigh) bool {
	return e.MasterIndex != 0 && e.State&netlink.NUD_PERMANENT == 0
}

// InUse returns the host link of the host that has an address on the bridge, or nothing. It queries
// this one address; neighbour entries without a port do not count.
func (n *Network) InUse(ctx context.Context, addr netip.Addr) (by string, err error) {
	if err := ctx.Err(); err != nil {
		return "", fmt.Errorf("find %s on the bridge: %w", addr, err)
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
		return "", fmt.Errorf("query neighbour %s: %w", addr, err)
	}
	if entry != nil && len(entry.HardwareAddr) > 0 {
		suspects = append(suspects, entry.HardwareAddr)
	}
	if v4 := n.ipv4Of(addr); v4.IsValid() { // ours, even after a flush of the neighbour table
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
		return "", fmt.Errorf("query port of %s: %w", mac, err)
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

// getNeigh reads one entry; nil means that there is none.
func getNeigh(q *nl.NetlinkRequest) (*netlink.Neigh, error) {
	messages, err := q.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil //nolint:nilnil // no entry is a valid result
	} else if err != nil {
		return nil, err
	}
	if len(messages) != 1 {
		return nil, fmt.Errorf("%d responses, want 1", len(messages))
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
