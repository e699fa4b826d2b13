package inventory

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

// An address is in use if one of five sources has it:
//
//	journal     every row in any stage, also one that cannot be read
//	containerd  the label of every container
//	runtimes    every container that they list, running or not
//	machine     every network namespace and port of the bridge
//	bridge      every neighbour behind a port
//
// This is conservative: an exiting container counts, and so do its leftovers. An error of one source is an error of
// all. [Scanner.Holder] checks one address in the same way.

// InUse returns all addresses in use; see above.
func (s *Scanner) InUse(ctx context.Context) ([]ipam.InUse, error) {
	rows, err := s.Journal.Summaries()
	if err != nil {
		return nil, err
	}
	records, err := s.Containerd.Records(ctx)
	if err != nil {
		return nil, err
	}
	return s.InUseWith(ctx, rows, records)
}

// InUseWith is InUse for a caller that has just read all rows and records.
func (s *Scanner) InUseWith(ctx context.Context, rows []journal.Summary, records []ctrd.Container) ([]ipam.InUse, error) {
	all := &liveSet{Scanner: s, seen: map[ipam.InUse]bool{}, owners: map[string]types.UID{}}
	all.addRows(rows)
	for uid := range s.Handles.UnreadIDs() {
		all.present(uid, "journal")
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
	*Scanner
	found []ipam.InUse
	seen  map[ipam.InUse]bool // by address and owner
	// owners are the known UIDs by sandbox ID and by port.
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
	s.owners[id], s.owners[s.Devices.HostLink(id)] = uid, uid
}

// present adds the lease of a sandbox that has a resource on the host.
func (s *liveSet) present(id, where string) {
	if uid, ok := s.owners[id]; ok {
		if lease, ok := s.Allocator.Of(string(uid)); ok {
			s.add(lease.Address, uid, where)
		}
	}
}

// addRows adds the journal's addresses, and the UIDs of all leases and rows.
func (s *liveSet) addRows(rows []journal.Summary) {
	for _, l := range s.Allocator.List() {
		if l.Owner != "" {
			s.know(types.UID(l.Owner))
		}
	}
	for _, r := range rows {
		s.know(r.Ref.UID)
		if r.Stage == "" {
			s.present(string(sandbox.IDOf(r.Ref.UID)), "journal: cannot be read")
			continue
		}
		if l, ok := s.Allocator.At(r.Address); r.Stage != journal.Removing || !ok || l.State != ipam.Cooling {
			s.add(r.Address, r.Ref.UID, "journal: "+string(r.Stage))
		} // else only the row is left, and the address was released
		s.present(string(r.ID), "journal: "+string(r.Stage)) // its row may not have the address yet
	}
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
	namespaces, err := s.Devices.List(ctx)
	failures := []error{look("network namespace", namespaces, err)}
	ports, err := s.Devices.Links(ctx)
	failures = append(failures, look("link", ports, err))
	for class, r := range s.Runtimes.All() {
		ids, err := r.List()
		failures = append(failures, look(string(class)+" container", ids, err))
	}
	return errors.Join(failures...)
}

func (s *liveSet) addNeighbours(ctx context.Context) error {
	neighbours, err := s.Devices.Neighbours(ctx)
	if err != nil {
		return err
	}
	for _, nb := range neighbours {
		if nb.Port == "" || !s.Devices.Subnet().Contains(nb.Address) {
			continue // not a sandbox's
		}
		owner := s.owners[nb.Port]
		if lease, ok := s.Allocator.Of(string(owner)); ok && lease.Address != nb.Address {
			owner = "" // the address is not its own
		}
		s.add(nb.Address, owner, "bridge, behind "+nb.Port)
	}
	return nil
}

// Holder returns the user of an address other than the sandbox itself; empty if there is none.
func (s *Scanner) Holder(ctx context.Context, addr netip.Addr, own sandbox.ID) (string, error) {
	for _, u := range s.Handles.At(addr) {
		if u.ID != own {
			return "sandbox " + string(u.ID), nil
		}
	}
	records, err := s.Containerd.RecordsWith(ctx, operation.LabelAddress, addr.String())
	if err != nil {
		return "", err
	}
	for _, r := range records {
		if r.ID != string(own) {
			return "the container of record " + r.ID, nil
		}
	}
	for _, a := range []netip.Addr{addr, ipam.Beside(s.Network.Subnet6, addr)} {
		if !a.IsValid() {
			continue
		}
		by, err := s.Devices.InUse(ctx, a)
		if err != nil {
			return "", errs.Retryable(err)
		}
		if by != "" && by != s.Devices.HostLink(string(own)) {
			return "a neighbour on the bridge: " + by, nil
		}
	}
	return "", nil
}
