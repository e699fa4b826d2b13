// Package replicated keeps the route tables of several replicas alike, ahead of their watches.
package replicated

import (
	"net/netip"
	"slices"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Hints are what other replicas push.
type Hints struct {
	Table *route.Table
	// Subnets have all addresses of sandboxes. None: they are not known here, and a hint may name any.
	Subnets []netip.Prefix
}

// Apply applies another replica's batch as hints; the watch has the base routes.
func (h Hints) Apply(_ string, batch []push.Route) {
	for _, r := range batch {
		switch {
		case !h.allows(r.Address):
		case r.Deleted:
			h.Table.HintDelete(r.ID, r.ResourceVersion)
		default:
			h.Table.Hint(r.Route)
		}
	}
}

func (h Hints) allows(addr netip.Addr) bool {
	return !addr.IsValid() || h.Subnets == nil || slices.ContainsFunc(h.Subnets, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// Routes is the table here, which pushes every write of the manager to the other replicas: also one that the watch has brought
// here first, since the watches of the others may be behind.
type Routes struct {
	*route.Table
	Peers Pusher // nil without replicas
}

// Pusher sends a route to the other replicas.
type Pusher interface {
	Push(r route.Route)
	PushDelete(r route.Route)
}

// Apply implements sandboxes.Routes.
func (t Routes) Apply(s *agents.Sandbox) bool {
	changed := t.Table.Apply(s)
	if t.Peers != nil {
		if r, keep := route.FromSandbox(s); keep {
			t.Peers.Push(r)
		} else {
			t.Peers.PushDelete(r)
		}
	}
	return changed
}

// ApplyDelete implements sandboxes.Routes.
func (t Routes) ApplyDelete(s *agents.Sandbox) bool {
	changed := t.Table.ApplyDelete(s)
	if t.Peers != nil {
		r, _ := route.FromSandbox(s)
		t.Peers.PushDelete(r)
	}
	return changed
}
