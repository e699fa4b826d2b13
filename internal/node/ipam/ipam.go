// Package ipam keeps the books of addresses: who holds which, in what state, since when. It
// knows nothing of networks or sandboxes; an owner is an opaque text, a sandbox's UID.
//
//	free → Reserved → Held
//	  ↑       ↓         ↓
//	  └──── Cooling ←───┘        Quarantined: out of use until a person frees it
//
// Every change is in the store before it is visible. An address that was given back rests for
// the cool-down and is never handed out earlier, not even when there is no other.
//
// # Subnets
//
// Allocator hands out addresses of one subnet. Leases in others, which the books had before they were
// given this one, stay known and can be released; nothing is handed out from there any more.
//
// # Clocks
//
// Within one process a cool-down is measured by the monotonic clock, whatever the wall clock
// does. When books are opened, what is left of one is reckoned from the wall clock and is never
// more than the whole: a clock that was set back makes it begin anew, and one that was set ahead
// by some time shortens it by no more than that time.
//
// # Locks
//
// [Allocator.writeMu] is taken first, by whoever changes something, and kept while the store is
// written. [Allocator.mu] guards what readers see, and is never kept over a call to the store; what
// it guards changes only while both are held.
package ipam

import (
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// State is what an address is doing.
type State string

// States. An address without a lease is free.
const (
	Reserved    State = "reserved"    // promised to its owner, who is not alive yet
	Held        State = "held"        // its owner is alive
	Quarantined State = "quarantined" // found in use by somebody unknown
	Cooling     State = "cooling"     // given back, not to be used yet
)

// Lease is what the books say of one address.
type Lease struct {
	Address netip.Addr
	// Owner is empty for quarantined and cooling addresses.
	Owner string
	State State
	Since time.Time
	// Until is when a cooling address may be handed out again; zero for others.
	Until time.Time
	// Reason says why an address is quarantined.
	Reason string
}

// Config is a range of addresses and its rules.
type Config struct {
	// Subnet is what addresses are handed out from; see [CheckSubnet].
	Subnet netip.Prefix
	// Excluded addresses are never handed out; the network's own and the broadcast address
	// are excluded by themselves.
	Excluded []netip.Addr
	// CoolDown is how long an address rests after its release.
	CoolDown time.Duration
	Store    Store
	Log      *slog.Logger
}

// entry is a lease as the books keep it.
type entry struct {
	Lease
	home  string       // the subnet that its row is filed under
	place *coolingItem // of a cooling address, in the queue
}

// coolingItem is an address in the queue of those that cool down.
type coolingItem struct {
	addr  netip.Addr
	until time.Time
}

// Allocator is one range of addresses. It is safe for concurrent use. The store must have no
// other writer.
type Allocator struct {
	// Set once, before anybody else has the books.
	cfg      Config                  // +checklocksignore
	log      *slog.Logger            // +checklocksignore
	home     string                  // +checklocksignore
	excluded map[netip.Addr]struct{} // +checklocksignore

	writeMu sync.Mutex

	mu     sync.Mutex
	leases map[netip.Addr]entry // +checklocks:mu
	// owners has the lease of each owner: the best one, where an interrupted change left two.
	owners map[string]netip.Addr // +checklocks:mu
	// unread are rows that cannot be read, and those of them that are filed under an address.
	unread   []Row                // +checklocks:mu
	unreadAt map[netip.Addr][]Row // +checklocks:mu
	// space has the addresses of the subnet that are not free.
	space *space // +checklocks:mu
	// homes are the other subnets that rows are filed under.
	homes []netip.Prefix // +checklocks:mu
	// count has the leases in the subnet by state.
	count map[State]int // +checklocks:mu
	// cooling is in the order in which the addresses will have rested. An address may have left
	// that state since, and be in it again: its place in the queue tells.
	cooling []*coolingItem // +checklocks:mu
	// expired are rows of addresses that are free again, by address; they go with later changes.
	expired  map[netip.Addr]string // +checklocks:mu
	lastUsed uint32                // +checklocks:mu
}

// Open reads the books. Rows that cannot be read are logged with their bytes and kept; where
// such a row's key is an address, that address is not handed out.
func Open(cfg Config) (*Allocator, error) {
	if err := CheckSubnet(cfg.Subnet); err != nil {
		return nil, fmt.Errorf("books of addresses: %w", err)
	}
	if cfg.Store == nil || cfg.Log == nil {
		return nil, fmt.Errorf("books of %s: a store and a logger are needed: %w", cfg.Subnet, errs.ErrInvalid)
	}
	cfg.Subnet = cfg.Subnet.Masked()
	b := &Allocator{
		cfg: cfg, log: cfg.Log.With(telemetry.Component, "ipam"), home: cfg.Subnet.String(), excluded: map[netip.Addr]struct{}{},
		leases: map[netip.Addr]entry{}, owners: map[string]netip.Addr{}, unreadAt: map[netip.Addr][]Row{},
		space: newSpace(cfg.Subnet), count: map[State]int{}, expired: map[netip.Addr]string{},
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	ends := []netip.Addr{b.space.addr(0), b.space.addr(b.space.size - 1)}
	for _, addr := range append(ends, cfg.Excluded...) {
		if cfg.Subnet.Contains(addr) {
			b.excluded[addr] = struct{}{}
			b.space.set(b.space.offset(addr), true)
		}
	}
	if err := b.readLocked(); err != nil {
		return nil, fmt.Errorf("read leases: %w", err)
	}
	return b, nil
}

// Subnet is what addresses are handed out from.
func (b *Allocator) Subnet() netip.Prefix { return b.cfg.Subnet }

// Reserve gives the owner an address. One who has a lease gets the same again, whatever
// happened in between, unless that is of another subnet: such an address is given back for a
// new one. The error is an errs.ErrExhausted with counts where none is free; after any error
// the books are as they were.
func (b *Allocator) Reserve(owner string) (netip.Addr, error) {
	if err := checkOwner(owner); err != nil {
		return netip.Addr{}, fmt.Errorf("reserve an address: %w", err)
	}
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	now := time.Now()
	old, owns := b.Of(owner)
	if owns && b.cfg.Subnet.Contains(old.Address) {
		return old.Address, nil
	}
	addr, err := b.next(now)
	if err != nil {
		return netip.Addr{}, err
	}
	leases := []Lease{{Address: addr, Owner: owner, State: Reserved, Since: now}}
	if owns {
		leases = append([]Lease{{Address: old.Address, State: Cooling, Since: now}}, leases...)
	}
	if err := b.write(leases...); err != nil {
		return netip.Addr{}, fmt.Errorf("reserve %s: %w", addr, err)
	}
	return addr, nil
}

func checkOwner(owner string) error {
	if owner == "" || !utf8.ValidString(owner) {
		return fmt.Errorf("owner %q: want a text that is not empty: %w", owner, errs.ErrInvalid)
	}
	return nil
}

func checkAddress(addr netip.Addr) error {
	if !addr.Is4() || addr.IsUnspecified() {
		return fmt.Errorf("address %s: want one of IPv4: %w", addr, errs.ErrInvalid)
	}
	return nil
}

// next finds the free address that follows the one given last, so that an address rests as
// long as the range allows.
//
// +checklocks:b.writeMu
func (b *Allocator) next(now time.Time) (netip.Addr, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expireLocked(now)
	if offset, ok := b.space.follow(b.lastUsed); ok {
		return b.space.addr(offset), nil
	}
	c := b.countsLocked(now)
	return netip.Addr{}, fmt.Errorf(
		"no free address in %s: %d held, %d reserved, %d cooling down for %s after use, %d quarantined, %d excluded: %w",
		b.cfg.Subnet, c.Held, c.Reserved, c.Cooling, b.cfg.CoolDown, c.Quarantined+c.Unread, c.Excluded, errs.ErrExhausted)
}

// expireLocked frees the addresses that have rested. The caller holds writeMu.
//
// +checklocks:b.mu
func (b *Allocator) expireLocked(now time.Time) {
	n := 0
	for ; n < len(b.cooling) && !now.Before(b.cooling[n].until); n++ {
		r := b.cooling[n]
		if e, ok := b.leases[r.addr]; ok && e.place == r {
			b.dropLocked(r.addr)
			b.expired[r.addr] = e.home
		}
	}
	b.cooling = b.cooling[n:]
}

// Hold says that the owner of a reserved address is alive. An address that is not the
// owner's is an errs.ErrConflict.
func (b *Allocator) Hold(owner string, addr netip.Addr) error {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	l, ok := b.At(addr)
	if !ok || l.Owner != owner || owner == "" {
		return fmt.Errorf("hold %s for %q: it is %s: %w", addr, owner, describe(l, ok), errs.ErrConflict)
	}
	if l.State == Held {
		return nil
	}
	l.State, l.Since = Held, time.Now()
	if err := b.write(l); err != nil {
		return fmt.Errorf("hold %s: %w", addr, err)
	}
	return nil
}

// Claim writes a live owner's address into the books where they do not have it, as a
// reconciler must: one that is free, cooling, quarantined, in a row that cannot be read, or of
// another subnet. Another owner's address, or another address of the owner, is an
// errs.ErrConflict.
func (b *Allocator) Claim(owner string, addr netip.Addr) error {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	return b.claim(owner, addr)
}

// claim does the work of Claim; the caller holds writeMu.
//
// +checklocks:b.writeMu
func (b *Allocator) claim(owner string, addr netip.Addr) error {
	if err := checkOwner(owner); err != nil {
		return fmt.Errorf("claim %s: %w", addr, err)
	}
	if err := checkAddress(addr); err != nil {
		return fmt.Errorf("claim for %q: %w", owner, err)
	}
	l, ok := b.At(addr)
	has, owns := b.Of(owner)
	switch {
	case ok && l.Owner == owner && l.State == Held:
		return nil
	case ok && l.Owner != "" && l.Owner != owner, owns && has.Address != addr && l.Owner != owner:
		return fmt.Errorf("claim %s for %q: it is %s, and the owner has %s: %w", addr, owner, describe(l, ok), orNone(has, owns), errs.ErrConflict)
	}
	if err := b.write(Lease{Address: addr, Owner: owner, State: Held, Since: time.Now()}); err != nil {
		return fmt.Errorf("claim %s: %w", addr, err)
	}
	return nil
}

// Release gives an address back; it cools down from then on. Only the owner can: another's
// address is an errs.ErrConflict. One that the owner does not have any more is success.
func (b *Allocator) Release(owner string, addr netip.Addr) error {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	l, ok := b.At(addr)
	switch {
	case !ok || l.Owner == "":
		return nil
	case l.Owner != owner:
		return fmt.Errorf("release %s by %q: it is %s: %w", addr, owner, describe(l, ok), errs.ErrConflict)
	}
	if err := b.write(Lease{Address: addr, State: Cooling, Since: time.Now()}); err != nil {
		return fmt.Errorf("release %s: %w", addr, err)
	}
	return nil
}

// Quarantine takes an address out of use because somebody unknown answers on it. Its owner,
// if it has one, loses it and may reserve another. It ends with Free, or with a Claim once the
// one who answers is known.
func (b *Allocator) Quarantine(addr netip.Addr, reason string) error {
	if err := checkAddress(addr); err != nil {
		return fmt.Errorf("quarantine: %w", err)
	}
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	if l, _ := b.At(addr); l.State == Quarantined || b.isUnread(addr) {
		return nil
	}
	if err := b.write(Lease{Address: addr, State: Quarantined, Since: time.Now(), Reason: reason}); err != nil {
		return fmt.Errorf("quarantine %s: %w", addr, err)
	}
	return nil
}

// Free ends a quarantine, also that of an address whose row cannot be read; the address cools
// down. It is for people. Any other address is an errs.ErrConflict that says who has it.
func (b *Allocator) Free(addr netip.Addr) error {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	if l, ok := b.At(addr); l.State != Quarantined && !b.isUnread(addr) {
		return fmt.Errorf("free %s: it is %s: %w", addr, describe(l, ok), errs.ErrConflict)
	}
	if err := b.write(Lease{Address: addr, State: Cooling, Since: time.Now()}); err != nil {
		return fmt.Errorf("free %s: %w", addr, err)
	}
	return nil
}

func describe(l Lease, ok bool) string {
	if !ok {
		return "free"
	}
	if l.Owner == "" {
		return string(l.State)
	}
	return fmt.Sprintf("%s by %q", l.State, l.Owner)
}

func orNone(l Lease, ok bool) string {
	if !ok {
		return "none"
	}
	return l.Address.String()
}
