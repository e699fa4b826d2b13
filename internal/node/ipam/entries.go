package ipam

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// unknownSubnet is the bucket for addresses outside all known subnets.
func unknownSubnet() netip.Prefix { return netip.PrefixFrom(netip.IPv4Unspecified(), 0) }

// maxExpiredPerWrite bounds the expired rows that one write deletes.
const maxExpiredPerWrite = 16

// readLocked loads all rows.
//
// +checklocks:b.mu
func (b *Allocator) readLocked() error {
	var rows []Row
	err := b.cfg.Store.Each(func(r Row) error {
		rows = append(rows, Row{r.Subnet, bytes.Clone(r.Key), bytes.Clone(r.Value)})
		return nil
	})
	if err != nil {
		return err
	}
	now := time.Now()
	var newest time.Time
	for _, r := range rows {
		e, ok := b.readRowLocked(r, now)
		if ok && b.cfg.Subnet.Contains(e.Address) && e.Since.After(newest) {
			newest, b.lastUsed = e.Since, b.space.offset(e.Address)
		}
	}
	slices.SortFunc(b.cooling, func(x, y *coolingItem) int { return x.until.Compare(y.until) })
	return nil
}

// readRowLocked loads one row.
//
// +checklocks:b.mu
func (b *Allocator) readRowLocked(r Row, now time.Time) (e entry, ok bool) {
	l, err := b.decodeLocked(r)
	if err != nil {
		b.log.Error("unreadable lease kept", "subnet", r.Subnet,
			"key", fmt.Sprintf("%q", r.Key), "value", fmt.Sprintf("%q", r.Value), telemetry.Error, err)
		b.unread = append(b.unread, r)
		if addr, ok := addressOf(r.Key); ok {
			b.unreadAt[addr] = append(b.unreadAt[addr], r)
			b.updateSpaceLocked(addr)
		}
		return entry{}, false
	}
	e = entry{Lease: l, home: r.Subnet}
	if l.State == Cooling {
		e.Until = now.Add(min(max(b.cfg.CoolDown-now.Sub(l.Since), 0), b.cfg.CoolDown))
	}
	first, twice := b.owners[l.Owner]
	b.putLocked(e)
	if twice && l.Owner != "" {
		b.log.Warn("owner has two leases", telemetry.UID, l.Owner,
			telemetry.Address, l.Address, "other", first)
		if preferred(b.leases[first].Lease, l) {
			b.owners[l.Owner] = first
		}
	}
	return e, true
}

// decodeLocked decodes a row; its subnet must contain the address, and no other row may have it.
//
// +checklocks:b.mu
func (b *Allocator) decodeLocked(r Row) (Lease, error) {
	home, err := netip.ParsePrefix(r.Subnet)
	if err != nil {
		return Lease{}, fmt.Errorf("decode lease: subnet %q: %w", r.Subnet, err)
	}
	l, err := decode(r.Key, r.Value, rowVersion)
	if err != nil {
		return Lease{}, err
	}
	other, twice := b.leases[l.Address]
	switch {
	case !home.Contains(l.Address):
		return Lease{}, fmt.Errorf("decode lease: address %s in subnet %s", l.Address, home)
	case twice:
		return Lease{}, fmt.Errorf("decode lease: subnet %s also has %s: %s", other.home, l.Address, describe(other.Lease, true))
	case home != b.cfg.Subnet && !slices.Contains(b.homes, home):
		b.homes = append(b.homes, home)
	}
	return l, nil
}

// preferred reports whether x is more likely than y to be the lease that their owner uses.
func preferred(x, y Lease) bool {
	if x.State != y.State {
		return x.State == Held
	}
	return x.Since.After(y.Since)
}

// updateSpaceLocked records in the space whether an address is free.
//
// +checklocks:b.mu
func (b *Allocator) updateSpaceLocked(addr netip.Addr) {
	if !b.cfg.Subnet.Contains(addr) {
		return
	}
	_, taken := b.leases[addr]
	_, unread := b.unreadAt[addr]
	_, excluded := b.excluded[addr]
	b.space.set(b.space.offset(addr), taken || unread || excluded)
}

// putLocked replaces the lease of an address in memory.
//
// +checklocks:b.mu
func (b *Allocator) putLocked(e entry) {
	b.dropLocked(e.Address)
	if e.State == Cooling {
		e.place = &coolingItem{e.Address, e.Until}
		b.cooling = append(b.cooling, e.place)
	}
	b.leases[e.Address] = e
	if e.Owner != "" {
		b.owners[e.Owner] = e.Address
	}
	if b.cfg.Subnet.Contains(e.Address) {
		b.count[e.State]++
	}
	b.updateSpaceLocked(e.Address)
}

// dropLocked removes the lease of an address from memory.
//
// +checklocks:b.mu
func (b *Allocator) dropLocked(addr netip.Addr) {
	e, ok := b.leases[addr]
	if !ok {
		return
	}
	delete(b.leases, addr)
	if b.owners[e.Owner] == addr {
		delete(b.owners, e.Owner)
	}
	if b.cfg.Subnet.Contains(addr) {
		b.count[e.State]--
	}
	b.updateSpaceLocked(addr)
}

// write stores leases, all or none, and then updates memory.
//
// +checklocks:b.writeMu
func (b *Allocator) write(leases ...Lease) error {
	entries, changes, err := b.plan(leases)
	if err != nil {
		return err
	}
	if err := b.cfg.Store.Apply(changes...); err != nil {
		if errs.Kind(err) == nil {
			err = fmt.Errorf("%w: %w", err, errs.ErrUnavailable)
		}
		return fmt.Errorf("write lease: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range changes {
		if addr, ok := addressOf(c.Key); ok {
			delete(b.expired, addr)
		}
	}
	for _, e := range entries {
		b.dropUnreadLocked(e.Address)
		b.putLocked(e)
		if e.State == Reserved && b.cfg.Subnet.Contains(e.Address) {
			b.lastUsed = b.space.offset(e.Address)
		}
	}
	return nil
}

// plan returns the store changes for leases: their rows, the removal of rows for the same addresses
// in other buckets, and of some expired rows.
//
// +checklocks:b.writeMu
func (b *Allocator) plan(leases []Lease) (entries []entry, changes []Row, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range leases {
		e := entry{Lease: l, home: b.homeLocked(l.Address)}
		if l.State == Cooling {
			e.Until = l.Since.Add(b.cfg.CoolDown)
		}
		value, err := encode(l)
		if err != nil {
			return nil, nil, err
		}
		key := []byte(l.Address.String())
		for _, home := range b.bucketsLocked(l.Address) {
			if home != e.home {
				changes = append(changes, Row{Subnet: home, Key: key})
			}
		}
		changes = append(changes, Row{Subnet: e.home, Key: key, Value: value})
		entries = append(entries, e)
	}
	n := 0
	for addr, home := range b.expired {
		if n++; n > maxExpiredPerWrite {
			break
		}
		if !slices.ContainsFunc(leases, func(l Lease) bool { return l.Address == addr }) {
			changes = append(changes, Row{Subnet: home, Key: []byte(addr.String())})
		}
	}
	return entries, changes, nil
}

// bucketsLocked lists the subnets whose buckets have rows of an address.
//
// +checklocks:b.mu
func (b *Allocator) bucketsLocked(addr netip.Addr) (homes []string) {
	if e, ok := b.leases[addr]; ok {
		homes = append(homes, e.home)
	}
	if home, ok := b.expired[addr]; ok {
		homes = append(homes, home)
	}
	for _, r := range b.unreadAt[addr] {
		homes = append(homes, r.Subnet)
	}
	return homes
}

// homeLocked returns the subnet whose bucket a lease belongs in.
//
// +checklocks:b.mu
func (b *Allocator) homeLocked(addr netip.Addr) string {
	if b.cfg.Subnet.Contains(addr) {
		return b.home
	}
	if e, ok := b.leases[addr]; ok {
		return e.home
	}
	home := unknownSubnet()
	for _, p := range b.homes {
		if p.Contains(addr) && p.Bits() > home.Bits() {
			home = p
		}
	}
	return home.String()
}

// dropUnreadLocked drops unreadable rows that a write has replaced.
//
// +checklocks:b.mu
func (b *Allocator) dropUnreadLocked(addr netip.Addr) {
	for _, r := range b.unreadAt[addr] {
		b.log.Warn("unreadable lease replaced", "subnet", r.Subnet,
			"key", fmt.Sprintf("%q", r.Key), "value", fmt.Sprintf("%q", r.Value))
		b.unread = slices.DeleteFunc(b.unread, func(u Row) bool { return u.Subnet == r.Subnet && bytes.Equal(u.Key, r.Key) })
	}
	delete(b.unreadAt, addr)
}
