package node

import (
	"context"
	"errors"
	"net/netip"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/operation"
)

// Which addresses are in use, and by whom, is known from five sources, and an address counts as
// in use if one of them says so:
//
//	journal     every row, in whatever stage: one that sleeps, has ended or is being removed has
//	            its address until the row is gone, and so has one whose row cannot be read
//	containerd  the label of every record
//	runtimes    every container that they list, whether it runs or not
//	machine     every network namespace and port of the bridge
//	bridge      every neighbour behind a port, whoever that is
//
// This is conservative: a container that is exiting counts, and so does the mere rest of one. If
// one of them does not answer, there is no answer: nothing may be decided then. The check of a
// fresh address ([Node.holder]) asks the same of one address.

// live tells all addresses in use; see above.
func (n *Node) live(ctx context.Context) ([]ipam.InUse, error) {
	all := &liveSet{n: n, seen: map[ipam.InUse]bool{}, owners: map[string]types.UID{}}
	if err := all.addRows(); err != nil {
		return nil, err
	}
	for uid := range n.handles.UnreadIDs() {
		all.present(uid, "journal")
	}
	records, err := n.cfg.Containerd.Records(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range records {
		all.addRecord(r)
	}
	if err := all.addTraces(ctx); err != nil {
		return nil, err
	}
	if err := all.addNeighbours(ctx); err != nil {
		return nil, err
	}
	return all.found, nil
}

// liveSet collects addresses in use.
type liveSet struct {
	n     *Node
	found []ipam.InUse
	seen  map[ipam.InUse]bool // by address and owner
	// owners are the UIDs that are known, by the sandbox's ID and by the name of its port; an ID
	// cannot be turned back into a UID.
	owners map[string]types.UID
}

func (s *liveSet) add(addr netip.Addr, owner types.UID, where string) {
	key := ipam.InUse{Address: addr, Owner: string(owner)}
	if !addr.IsValid() || s.seen[key] {
		return
	}
	s.seen[key] = true
	s.found = append(s.found, ipam.InUse{Address: addr, Owner: string(owner), Where: where})
}

func (s *liveSet) know(uid types.UID) {
	id := string(sandbox.IDOf(uid))
	s.owners[id], s.owners[s.n.network.HostLink(id)] = uid, uid
}

// present notes that something of a sandbox is there: the lease that it has is in use.
func (s *liveSet) present(id, where string) {
	if uid, ok := s.owners[id]; ok {
		if lease, ok := s.n.allocator.Of(string(uid)); ok {
			s.add(lease.Address, uid, where)
		}
	}
}

// addRows adds what the journal has, and learns of all UIDs.
func (s *liveSet) addRows() error {
	for _, l := range s.n.allocator.List() {
		if l.Owner != "" {
			s.know(types.UID(l.Owner))
		}
	}
	return s.n.journal.Each(func(r *journal.Row) {
		s.know(r.Plan.Ref.UID)
		if l, ok := s.n.allocator.At(r.Address); r.Stage != journal.Removing || !ok || l.State != ipam.Cooling {
			s.add(r.Address, r.Plan.Ref.UID, "journal: "+string(r.Stage))
		} // else all of it is gone but the row, and the address was just given back
		s.present(string(r.Plan.ID), "journal: "+string(r.Stage)) // its row may not have the address yet
	}, func(key, _ []byte, _ error) {
		s.know(types.UID(key))
		s.present(string(sandbox.IDOf(types.UID(key))), "journal: cannot be read")
	})
}

func (s *liveSet) addRecord(r ctrd.Container) {
	uid := types.UID(r.Labels[operation.LabelSandbox])
	if uid != "" {
		s.know(uid)
	}
	if addr, err := netip.ParseAddr(r.Labels[operation.LabelAddress]); err == nil {
		s.add(addr, uid, "record "+r.ID)
	}
	s.present(r.ID, "record "+r.ID)
}

func (s *liveSet) addTraces(ctx context.Context) error {
	look := func(kind string, names []string, err error) error {
		for _, name := range names {
			s.present(name, kind+" "+name)
		}
		return err
	}
	namespaces, err := s.n.network.List(ctx)
	failures := []error{look("network namespace", namespaces, err)}
	ports, err := s.n.network.Links(ctx)
	failures = append(failures, look("link", ports, err))
	for class, r := range s.n.runtimes.All() {
		ids, err := r.List()
		failures = append(failures, look(string(class)+" container", ids, err))
	}
	return errors.Join(failures...)
}

func (s *liveSet) addNeighbours(ctx context.Context) error {
	neighbours, err := s.n.network.Neighbours(ctx)
	if err != nil {
		return err
	}
	for _, nb := range neighbours {
		if nb.Port == "" || !s.n.network.Subnet().Contains(nb.Address) {
			continue // nobody is behind it
		}
		owner := s.owners[nb.Port]
		if lease, ok := s.n.allocator.Of(string(owner)); ok && lease.Address != nb.Address {
			owner = "" // it uses what is not its own
		}
		s.add(nb.Address, owner, "bridge, behind "+nb.Port)
	}
	return nil
}

// holder says who but the sandbox itself uses an address, as live does of all; it is empty where
// nobody does.
func (n *Node) holder(ctx context.Context, addr netip.Addr, own sandbox.ID) (string, error) {
	for _, u := range n.handles.All() {
		if r := u.Row(); r != nil && r.Address == addr && u.ID != own {
			return "sandbox " + string(u.ID), nil
		}
	}
	records, err := n.cfg.Containerd.RecordsWith(ctx, operation.LabelAddress, addr.String())
	if err != nil {
		return "", err
	}
	for _, r := range records {
		if r.ID != string(own) {
			return "the container of record " + r.ID, nil
		}
	}
	for _, a := range []netip.Addr{addr, n.host.Beside(addr)} {
		if !a.IsValid() {
			continue
		}
		by, err := n.network.InUse(ctx, a)
		if err != nil {
			return "", errs.Retryable(err)
		}
		if by != "" && by != n.network.HostLink(string(own)) {
			return "a neighbour on the bridge: " + by, nil
		}
	}
	return "", nil
}
