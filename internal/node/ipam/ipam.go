// Package ipam allocates IPv4 addresses and keeps the lease table. It does not configure networks
// or know sandboxes; an owner is an opaque string, a sandbox's UID.
//
//	free → Reserved → Held
//	  ↑       ↓         ↓
//	  └──── Cooling ←───┘        Quarantined: out of use until an operator frees it
//
// Every change is stored before it is visible. A released address cools down and is not leased
// earlier, even if no other is free.
//
// # Subnets
//
// Allocator leases addresses of one subnet. Leases in formerly configured subnets stay valid and can
// be released.
//
// # Clocks
//
// A process measures cool-downs by the monotonic clock. [Open] computes the remaining time from the
// wall clock, at most one cool-down: a clock set back restarts it, and one set ahead shortens it by
// at most that difference.
//
// # Locks
//
// [Allocator.writeMu] comes first: every change holds it, also while the store is written.
// [Allocator.mu] guards the state for readers and is not held over store calls; that state changes
// only while both are held.
package ipam

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// State is the state of an address.
type State string

// States. An address without a lease is free.
const (
	Reserved    State = "reserved"    // leased to an owner that does not run yet
	Held        State = "held"        // its owner runs
	Quarantined State = "quarantined" // in use by an unknown owner
	Cooling     State = "cooling"     // released, not leased again yet
)

// Lease is the state of one address.
type Lease struct {
	Address netip.Addr
	// Owner is empty for quarantined and cooling addresses.
	Owner string
	State State
	Since time.Time
	// Until is the end of the cool-down; zero in other states.
	Until time.Time
	// Reason is the cause of a quarantine.
	Reason string
}

// Config is a subnet and its rules.
type Config struct {
	// Subnet is the range of addresses; see [CheckSubnet].
	Subnet netip.Prefix
	// Excluded addresses are never leased; the network and broadcast addresses are always excluded.
	Excluded []netip.Addr
	// CoolDown is the time between a release and the next lease.
	CoolDown time.Duration
	Store    Store
	Log      *slog.Logger
}

type entry struct {
	Lease
	home  string       // the subnet whose bucket has its row
	place *coolingItem // of a cooling address, in the queue
}

// coolingItem is an address in the cool-down queue.
type coolingItem struct {
	addr  netip.Addr
	until time.Time
}

// Allocator leases the addresses of one subnet. It is safe for concurrent use. The store must have
// no other writer.
type Allocator struct {
	// Set once, before the allocator is shared.
	cfg      Config                  // +checklocksignore
	log      *slog.Logger            // +checklocksignore
	home     string                  // +checklocksignore
	excluded map[netip.Addr]struct{} // +checklocksignore

	writeMu sync.Mutex

	mu     sync.Mutex
	leases map[netip.Addr]entry // +checklocks:mu
	// owners has the address of each owner: the preferred one, where an interrupted change left
	// two.
	owners map[string]netip.Addr // +checklocks:mu
	// unread are the unreadable rows, and unreadAt those whose key is an address.
	unread   []Row                // +checklocks:mu
	unreadAt map[netip.Addr][]Row // +checklocks:mu
	// space has the subnet's addresses that are not free.
	space *space // +checklocks:mu
	// homes are the other subnets that have rows.
	homes []netip.Prefix // +checklocks:mu
	// count has the leases in the subnet by state.
	count map[State]int // +checklocks:mu
	// cooling is ordered by the end of the cool-down. An address may have left that state since, or
	// entered it again: entry.place identifies its current item.
	cooling []*coolingItem // +checklocks:mu
	// expired are rows of addresses that are free again, by address; later writes delete them.
	expired  map[netip.Addr]string // +checklocks:mu
	lastUsed uint32                // +checklocks:mu
}

// Open loads the lease table. Unreadable rows are logged with their bytes and kept; an address that
// is the key of such a row is not leased.
func Open(cfg Config) (*Allocator, error) {
	if err := CheckSubnet(cfg.Subnet); err != nil {
		return nil, fmt.Errorf("lease table: %w", err)
	}
	if cfg.Store == nil || cfg.Log == nil {
		return nil, fmt.Errorf("lease table of %s: store and logger required: %w", cfg.Subnet, errs.ErrInvalid)
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

// Subnet returns the subnet of new leases.
func (b *Allocator) Subnet() netip.Prefix { return b.cfg.Subnet }

// Reserve leases an address to the owner, or returns the owner's lease if it is in this subnet. A
// lease in another subnet is released. If no address is free, the error is an errs.ErrExhausted
// with counts. An error leaves the lease table unchanged.
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

// maxConflicts bounds the addresses in use that one ReserveUnused quarantines.
const maxConflicts = 32

// ReserveUnused is Reserve of an address that nothing uses, since the lease table may be wrong: holder returns the user of an
// address besides the owner, empty if there is none. Addresses in use are quarantined.
func (b *Allocator) ReserveUnused(ctx context.Context, owner string, holder func(context.Context, netip.Addr) (string, error)) (netip.Addr, error) {
	for range maxConflicts {
		addr, err := b.Reserve(owner)
		if err != nil {
			return netip.Addr{}, err
		}
		user, err := holder(ctx, addr)
		if err != nil {
			return netip.Addr{}, fmt.Errorf("find holder of %s: %w", addr, err)
		}
		if user == "" {
			return addr, nil
		}
		b.log.ErrorContext(ctx, "free address in use; quarantined", telemetry.Address, addr, "by", user)
		if err := b.Quarantine(addr, "in use by "+user); err != nil {
			return netip.Addr{}, err
		}
	}
	return netip.Addr{}, fmt.Errorf("%d addresses in a row are in use but not leased, and were quarantined; run `barchan net leases`: %w",
		maxConflicts, errs.ErrExhausted)
}

func checkOwner(owner string) error {
	if owner == "" || !utf8.ValidString(owner) {
		return fmt.Errorf("owner %q: want a non-empty UTF-8 text: %w", owner, errs.ErrInvalid)
	}
	return nil
}

func checkAddress(addr netip.Addr) error {
	if !addr.Is4() || addr.IsUnspecified() {
		return fmt.Errorf("address %s: want IPv4: %w", addr, errs.ErrInvalid)
	}
	return nil
}

// next returns the next free address after the last one used, so that addresses are reused as late
// as possible.
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

// expireLocked frees the addresses whose cool-down is over. The caller holds writeMu.
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

// Hold marks a reserved address as held, because its owner runs. An address that is not the owner's
// is an errs.ErrConflict.
func (b *Allocator) Hold(owner string, addr netip.Addr) error {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	l, ok := b.At(addr)
	if !ok || l.Owner != owner || owner == "" {
		return fmt.Errorf("hold %s for %q: address is %s: %w", addr, owner, describe(l, ok), errs.ErrConflict)
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

// Claim holds an address for a running owner, for a reconciler. The address may be free, cooling,
// quarantined, in an unreadable row, or in another subnet. Another owner's address, or a second
// address for the owner, is an errs.ErrConflict.
func (b *Allocator) Claim(owner string, addr netip.Addr) error {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	return b.claim(owner, addr)
}

// claim is Claim for callers that hold writeMu.
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
		return fmt.Errorf("claim %s for %q: address is %s, owner has %s: %w", addr, owner, describe(l, ok), orNone(has, owns), errs.ErrConflict)
	}
	if err := b.write(Lease{Address: addr, Owner: owner, State: Held, Since: time.Now()}); err != nil {
		return fmt.Errorf("claim %s: %w", addr, err)
	}
	return nil
}

// Release starts an address's cool-down. Another owner's address is an errs.ErrConflict. An address
// without an owner is success.
func (b *Allocator) Release(owner string, addr netip.Addr) error {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	l, ok := b.At(addr)
	switch {
	case !ok || l.Owner == "":
		return nil
	case l.Owner != owner:
		return fmt.Errorf("release %s by %q: address is %s: %w", addr, owner, describe(l, ok), errs.ErrConflict)
	}
	if err := b.write(Lease{Address: addr, State: Cooling, Since: time.Now()}); err != nil {
		return fmt.Errorf("release %s: %w", addr, err)
	}
	return nil
}

// Quarantine takes an address out of use because an unknown host answers on it. Its owner, if any,
// loses the lease and may reserve another. It ends with Free, or with a Claim by the known owner.
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

// Free ends a quarantine, also that of an address with an unreadable row; the address cools down.
// It is for operators. Any other address is an errs.ErrConflict that names its owner.
func (b *Allocator) Free(addr netip.Addr) error {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	if l, ok := b.At(addr); l.State != Quarantined && !b.isUnread(addr) {
		return fmt.Errorf("free %s: address is %s: %w", addr, describe(l, ok), errs.ErrConflict)
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
