package ipam

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Of returns the owner's lease.
func (b *Allocator) Of(owner string) (Lease, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	addr, ok := b.owners[owner]
	return b.leases[addr].Lease, ok
}

// At returns the lease of an address. A free one has none.
func (b *Allocator) At(addr netip.Addr) (Lease, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e, ok := b.leases[addr]
	if !ok || e.isExpired(time.Now()) {
		return Lease{}, false
	}
	return e.Lease, true
}

func (e entry) isExpired(now time.Time) bool { return e.State == Cooling && !now.Before(e.Until) }

// List returns the leases of all subnets by address, without those whose cool-down is over.
func (b *Allocator) List() []Lease {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	all := make([]Lease, 0, len(b.leases))
	for _, e := range b.leases {
		if !e.isExpired(now) {
			all = append(all, e.Lease)
		}
	}
	slices.SortFunc(all, func(x, y Lease) int { return x.Address.Compare(y.Address) })
	return all
}

// Unread returns the unreadable rows. The caller must not change them.
func (b *Allocator) Unread() []Row {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.unread)
}

func (b *Allocator) isUnread(addr netip.Addr) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, bad := b.unreadAt[addr]
	return bad
}

// Counts are the addresses of a subnet by state.
type Counts struct {
	Subnet netip.Prefix
	// Current marks the subnet of new leases. Total, Excluded and Free are zero for others.
	Current bool
	// Total is all addresses but the network and broadcast addresses; Excluded are never leased.
	Total, Excluded, Free                int
	Reserved, Held, Quarantined, Cooling int
	// Unread are addresses without a lease that are out of use because their row is unreadable.
	Unread int
}

// Counts returns the subnet of new leases, and then the others with leases, in address order.
func (b *Allocator) Counts() []Counts {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	others := map[netip.Prefix]*Counts{}
	for addr, e := range b.leases {
		if b.cfg.Subnet.Contains(addr) || e.isExpired(now) {
			continue
		}
		home := netip.MustParsePrefix(e.home) // checked when read or written
		c := others[home]
		if c == nil {
			c = &Counts{Subnet: home}
			others[home] = c
		}
		c.add(e.State)
	}
	out := []Counts{b.countsLocked(now)}
	for _, home := range slices.SortedFunc(maps.Keys(others), netip.Prefix.Compare) {
		out = append(out, *others[home])
	}
	return out
}

func (c *Counts) add(s State) {
	switch s {
	case Reserved:
		c.Reserved++
	case Held:
		c.Held++
	case Quarantined:
		c.Quarantined++
	case Cooling:
		c.Cooling++
	}
}

// countsLocked counts the subnet of new leases.
//
// +checklocks:b.mu
func (b *Allocator) countsLocked(now time.Time) Counts {
	c := Counts{
		Subnet: b.cfg.Subnet, Current: true,
		Total: int(b.space.size) - 2, Excluded: len(b.excluded) - 2, Free: b.space.free,
		Reserved: b.count[Reserved], Held: b.count[Held], Quarantined: b.count[Quarantined], Cooling: b.count[Cooling],
	}
	for addr := range b.unreadAt {
		if _, leased := b.leases[addr]; !leased && b.cfg.Subnet.Contains(addr) {
			c.Unread++
		}
	}
	for _, r := range b.cooling { // the next reservation frees these
		if now.Before(r.until) {
			break
		}
		e, ok := b.leases[r.addr]
		if _, excluded := b.excluded[r.addr]; ok && e.place == r && b.cfg.Subnet.Contains(r.addr) {
			c.Cooling--
			if !excluded {
				c.Free++
			}
		}
	}
	return c
}
