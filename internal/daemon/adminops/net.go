package adminops

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/node"
	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/node/ipam"
)

// network lists leases, and traces what sandboxes may reach.
type network struct{ Server }

func (w network) node(ctx context.Context) (*node.Node, error) {
	p, err := w.own(ctx)
	if err != nil {
		return nil, err
	}
	return p.Machine.Node, nil
}

// Leases lists the addresses that are not free, with the names of their sandboxes.
func (w network) Leases(ctx context.Context) ([]adminclient.Lease, error) {
	p, err := w.own(ctx)
	if err != nil {
		return nil, err
	}
	n := p.Machine.Node
	list, err := p.Cache.Sandboxes(ctx, "")
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for i := range list {
		names[string(list[i].UID)] = list[i].Namespace + "/" + list[i].Name
	}
	leases := n.Leases()
	out := make([]adminclient.Lease, len(leases))
	for i, l := range leases {
		out[i] = adminclient.Lease{
			Address: l.Address, Address6: ipam.Beside(w.cfg.Config.Subnet6, l.Address), State: string(l.State),
			Owner: l.Owner, Sandbox: idOfOwner(l.Owner), Name: names[l.Owner], Since: l.Since, Until: l.Until, Reason: l.Reason,
		}
	}
	return out, nil
}

// idOfOwner is the ID of the sandbox that an address is leased to; empty without an owner.
func idOfOwner(uid string) string {
	if uid == "" {
		return ""
	}
	return string(sandbox.IDOf(types.UID(uid)))
}

// Subnets counts addresses by their states.
func (w network) Subnets(ctx context.Context) ([]adminclient.Subnet, error) {
	n, err := w.node(ctx)
	if err != nil {
		return nil, err
	}
	counts := n.Subnets()
	out := make([]adminclient.Subnet, len(counts))
	for i, c := range counts {
		out[i] = adminclient.Subnet{
			Subnet: c.Subnet, Current: c.Current, Total: c.Total, Excluded: c.Excluded, Free: c.Free,
			Reserved: c.Reserved, Held: c.Held, Quarantined: c.Quarantined, Cooling: c.Cooling, Unread: c.Unread,
		}
		if c.Current {
			out[i].Subnet6 = w.cfg.Config.Subnet6
		}
	}
	return out, nil
}

// FreeAddress ends a quarantine.
func (w network) FreeAddress(ctx context.Context, addr netip.Addr) error {
	n, err := w.node(ctx)
	if err != nil {
		return err
	}
	err = n.FreeAddress(addr)
	for _, l := range n.Leases() {
		if l.Address == addr && l.Owner != "" && errors.Is(err, errs.ErrConflict) {
			id := idOfOwner(l.Owner)
			return errs.Public(err, fmt.Sprintf("%s is %s by sandbox %s; it is given back when that ends: `barchan kill %s`", addr, l.State, id, id))
		}
	}
	return err
}

// CheckAddresses compares the leases with the addresses in use.
func (w network) CheckAddresses(ctx context.Context) ([]adminclient.Repair, error) {
	n, err := w.node(ctx)
	if err != nil {
		return nil, err
	}
	repairs, err := n.CheckAddresses(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]adminclient.Repair, len(repairs))
	for i, r := range repairs {
		out[i] = adminclient.Repair{
			Kind: r.Kind, Address: r.Address, Owner: r.Owner, Sandbox: idOfOwner(r.Owner), Where: r.Where, Detail: r.Detail,
		}
	}
	return out, nil
}

// TraceEgress returns the rule that decides on a sandbox's packets.
func (w network) TraceEgress(ctx context.Context, req adminclient.TraceRequest) (adminclient.Trace, error) {
	n, err := w.node(ctx)
	if err != nil {
		return adminclient.Trace{}, err
	}
	id, err := sandbox.ParseID(req.Sandbox)
	if err != nil {
		return adminclient.Trace{}, err
	}
	d, err := n.TraceEgress(ctx, id, egress.Query{Destination: req.Destination, Port: req.Port, Protocol: req.Protocol})
	if err != nil {
		return adminclient.Trace{}, err
	}
	return adminclient.Trace{TraceRequest: req, Verdict: string(d.Verdict), Rule: d.Rule, Source: string(d.Source)}, nil
}
