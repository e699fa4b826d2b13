package firewall

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/egress"
)

// conntrackTries bounds the retries of a list that changes while the kernel writes it.
const conntrackTries = 50

// forbidden matches the connections of a sandbox that its policy ends. After its conntrack entry
// is deleted, a connection's next packet is filtered like the first of a new one.
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
	// The real destination is the source of replies: NAT may have replaced the original one.
	to, ok := netip.AddrFromSlice(flow.Reverse.SrcIP)
	if to = to.Unmap(); !ok || slices.Contains(f.gateways, to) {
		return false
	}
	_, pinned := f.of.pins[to]
	return !f.of.policy.Survives(f.before, to, pinned)
}

// cutForbidden ends connections that were open under another policy, before, which may be the
// zero Policy. A kernel that cannot list connections is an error: they would stay open.
//
// +checklocks:r.mu
func (r *Rules) cutForbidden(of *placed, before egress.Policy) error {
	if r.flows == nil { // reused, like the connection to nftables
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
		for try := 0; try < conntrackTries && errors.Is(err, netlink.ErrDumpInterrupted); try++ {
			_, err = r.flows.ConntrackDeleteFilters(netlink.ConntrackTable, family, forbidden{of, before, r.hostRules().Gateways})
		}
		if err != nil {
			failures = append(failures, fmt.Errorf("cut connections: %w", err))
		}
	}
	return errors.Join(failures...)
}
