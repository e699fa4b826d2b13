package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/egress"
)

// forbidden finds the connections of a sandbox that its policy does not let go on. Once the
// kernel has forgotten one, its next packet is judged as the first of a new one.
type forbidden struct {
	of       *placed
	before   egress.Policy
	gateways []netip.Addr
}

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (f forbidden) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	from, _ := netip.AddrFromSlice(flow.Forward.SrcIP)
	if !slices.Contains(f.of.sources[:], from.Unmap()) {
		return false
	}
	// Where it goes is where answers come from, whatever address it was sent to.
	to, ok := netip.AddrFromSlice(flow.Reverse.SrcIP)
	if to = to.Unmap(); !ok || slices.Contains(f.gateways, to) {
		return false
	}
	_, pinned := f.of.pins[to]
	return !f.of.policy.Survives(f.before, to, pinned)
}

// cutForbidden ends connections that were open under another policy, before, which may be the
// zero Policy. A kernel that cannot list connections is an error: they would go on.
//
// +checklocks:r.mu
func (r *ruleset) cutForbidden(of *placed, before egress.Policy) error {
	if r.flows == nil { // kept, as the connection to nftables is
		handle, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
		if err != nil {
			return fmt.Errorf("open netlink: %w", err)
		}
		r.flows = handle
	}
	var failures []error
	for i, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		if !of.sources[i].IsValid() {
			continue
		}
		var err error = netlink.ErrDumpInterrupted
		for try := 0; try < listTries && errors.Is(err, netlink.ErrDumpInterrupted); try++ {
			_, err = r.flows.ConntrackDeleteFilters(netlink.ConntrackTable, family, forbidden{of, before, r.ground().Gateways})
		}
		if err != nil {
			failures = append(failures, fmt.Errorf("cut connections: %w", err))
		}
	}
	return errors.Join(failures...)
}
