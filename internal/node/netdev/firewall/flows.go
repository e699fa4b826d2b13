package firewall

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/egress"
)

// forbidden matches the connections of a sandbox that its policy ends.
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
	var failures []error
	for i, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		if of.sources[i].IsValid() {
			failures = append(failures, r.flows.Delete(family, forbidden{of, before, r.hostRules().Gateways}))
		}
	}
	return errors.Join(failures...)
}
