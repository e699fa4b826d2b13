// Package ipam keeps the books of addresses: who holds which, in what state, since when. It
// knows nothing of networks or sandboxes; an owner is an opaque text, a sandbox's UID.
//
//	free → Reserved → Held
//	  ↑       ↓         ↓
//	  └──── Cooling ←───┘        Quarantined: out of use until a person frees it
//
// Every change is in the store before it is visible. An address that was given back rests for
// the cool-down and is never handed out earlier, not even when there is no other.
package ipam

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/errs"
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
	Address netip.Addr `json:"address"`
	// Owner is empty for quarantined and cooling addresses.
	Owner string    `json:"owner,omitempty"`
	State State     `json:"state"`
	Since time.Time `json:"since"`
	// Reason says why an address is quarantined.
	Reason string `json:"reason,omitempty"`
}

// Change is one row to put, or with a nil Value to remove.
type Change struct{ Key, Value []byte }

// Store keeps rows durably. Apply makes all changes at once or none, and returns when they
// would survive a power cut.
type Store interface {
	Each(visit func(key, value []byte) error) error
	Apply(changes ...Change) error
}

// Config is a range of addresses and its rules.
type Config struct {
	Subnet netip.Prefix
	// Excluded addresses are never handed out; the network's own and the broadcast address
	// are excluded by themselves.
	Excluded []netip.Addr
	// CoolDown is how long an address rests after its release.
	CoolDown time.Duration
	Store    Store
	Log      *slog.Logger
}

// Books is one range of addresses. It is safe for concurrent use. The store must have no
// other writer.
type Books struct {
	// Set once, before anybody else has the books.
	cfg   Config       // +checklocksignore
	log   *slog.Logger // +checklocksignore
	first netip.Addr   // +checklocksignore
	last  netip.Addr   // +checklocksignore

	mu       sync.Mutex
	leases   map[netip.Addr]Lease    // +checklocks:mu
	owners   map[string]netip.Addr   // +checklocks:mu
	unread   map[netip.Addr]struct{} // +checklocks:mu
	lastUsed netip.Addr              // +checklocks:mu
}

// Open reads the books. Rows that cannot be read are logged with their bytes and kept; where
// such a row's key is an address, that address is not handed out.
func Open(cfg Config) (*Books, error) {
	switch {
	case !cfg.Subnet.IsValid() || cfg.Subnet.Addr().BitLen()-cfg.Subnet.Bits() < 2:
		return nil, fmt.Errorf("address range %s: want a prefix with at least 4 addresses: %w", cfg.Subnet, errs.ErrInvalid)
	case cfg.Store == nil || cfg.Log == nil:
		return nil, fmt.Errorf("address range %s: a store and a logger are needed: %w", cfg.Subnet, errs.ErrInvalid)
	}
	b := &Books{
		cfg: cfg, log: cfg.Log.With("component", "ipam"),
		first: cfg.Subnet.Masked().Addr().Next(), last: lastOf(cfg.Subnet).Prev(),
		leases: map[netip.Addr]Lease{}, owners: map[string]netip.Addr{}, unread: map[netip.Addr]struct{}{},
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lastUsed = cfg.Subnet.Masked().Addr()
	if err := cfg.Store.Each(b.readLocked); err != nil {
		return nil, fmt.Errorf("read leases: %w", err)
	}
	return b, nil
}

// readLocked takes one row in.
//
// +checklocks:b.mu
func (b *Books) readLocked(key, value []byte) error {
	l, err := decode(key, value)
	if other, taken := b.owners[l.Owner]; err == nil && taken && l.Owner != "" {
		err = fmt.Errorf("owner %q has %s already", l.Owner, other)
	}
	if err != nil {
		b.log.Error("lease cannot be read; it is kept", "key", fmt.Sprintf("%q", key), "value", fmt.Sprintf("%q", value), "error", err)
		var addr netip.Addr
		if addr.UnmarshalText(key) == nil {
			b.unread[addr] = struct{}{}
		}
		return nil
	}
	b.leases[l.Address] = l
	if l.Owner != "" {
		b.owners[l.Owner] = l.Address
	}
	return nil
}

// decode reads a row; its key is the address as text.
func decode(key, value []byte) (l Lease, err error) {
	if err := json.Unmarshal(value, &l); err != nil {
		return Lease{}, fmt.Errorf("decode lease: %w", err)
	}
	owned := l.State == Reserved || l.State == Held
	switch {
	case !l.Address.IsValid() || l.Address.String() != string(key):
		return Lease{}, fmt.Errorf("decode lease: address %s under key %q", l.Address, key)
	case !owned && l.State != Quarantined && l.State != Cooling:
		return Lease{}, fmt.Errorf("decode lease: unknown state %q", l.State)
	case owned != (l.Owner != ""):
		return Lease{}, fmt.Errorf("decode lease: state %s with owner %q", l.State, l.Owner)
	}
	return l, nil
}

// Reserve gives the owner an address. One who has a lease gets the same again, whatever
// happened in between. The error is an errs.ErrExhausted with counts where none is free.
func (b *Books) Reserve(owner string) (netip.Addr, error) {
	if owner == "" {
		return netip.Addr{}, fmt.Errorf("reserve an address: the owner is empty: %w", errs.ErrInvalid)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if addr, ok := b.owners[owner]; ok {
		return addr, nil
	}
	addr, err := b.nextLocked(time.Now())
	if err != nil {
		return netip.Addr{}, err
	}
	if err := b.putLocked(Lease{Address: addr, Owner: owner, State: Reserved, Since: time.Now()}); err != nil {
		return netip.Addr{}, fmt.Errorf("reserve %s: %w", addr, err)
	}
	b.lastUsed = addr
	return addr, nil
}

// nextLocked finds the free address that follows the one given last, so that an address
// rests as long as the range allows.
//
// +checklocks:b.mu
func (b *Books) nextLocked(now time.Time) (netip.Addr, error) {
	counts := map[State]int{}
	start := b.lastUsed
	for addr := b.followLocked(start); ; addr = b.followLocked(addr) {
		state := b.stateLocked(addr, now)
		if state == "" {
			return addr, nil
		}
		counts[state]++
		if addr == start || (start == b.cfg.Subnet.Masked().Addr() && addr == b.last) {
			return netip.Addr{}, fmt.Errorf(
				"no free address in %s: %d held, %d reserved, %d cooling down for %s after use, %d quarantined, %d excluded: %w",
				b.cfg.Subnet, counts[Held], counts[Reserved], counts[Cooling], b.cfg.CoolDown, counts[Quarantined], counts["excluded"], errs.ErrExhausted)
		}
	}
}

// +checklocks:b.mu
func (b *Books) followLocked(addr netip.Addr) netip.Addr {
	if addr == b.last {
		return b.first
	}
	return addr.Next()
}

// stateLocked is empty for a free address.
//
// +checklocks:b.mu
func (b *Books) stateLocked(addr netip.Addr, now time.Time) State {
	if slices.Contains(b.cfg.Excluded, addr) {
		return "excluded"
	}
	if _, bad := b.unread[addr]; bad {
		return Quarantined
	}
	l, ok := b.leases[addr]
	if !ok || (l.State == Cooling && now.Sub(l.Since) >= b.cfg.CoolDown) {
		return ""
	}
	return l.State
}

// Hold says that the owner of a reserved address is alive. An address that is not the
// owner's is an errs.ErrConflict.
func (b *Books) Hold(owner string, addr netip.Addr) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	l, ok := b.leases[addr]
	if !ok || l.Owner != owner || owner == "" {
		return fmt.Errorf("hold %s for %q: it is %s: %w", addr, owner, describe(l, ok), errs.ErrConflict)
	}
	if l.State == Held {
		return nil
	}
	l.State, l.Since = Held, time.Now()
	if err := b.putLocked(l); err != nil {
		return fmt.Errorf("hold %s: %w", addr, err)
	}
	return nil
}

// Claim writes a live owner's address into the books where they do not have it, as a
// reconciler must. Another owner's address, or another address of the owner, is an errs.ErrConflict.
func (b *Books) Claim(owner string, addr netip.Addr) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	l, ok := b.leases[addr]
	has, owns := b.owners[owner]
	switch {
	case owner == "" || !b.cfg.Subnet.Contains(addr):
		return fmt.Errorf("claim %s for %q: not of %s, or no owner: %w", addr, owner, b.cfg.Subnet, errs.ErrInvalid)
	case ok && l.Owner == owner && l.State == Held:
		return nil
	case ok && l.Owner != "" && l.Owner != owner, owns && has != addr:
		return fmt.Errorf("claim %s for %q: it is %s, and the owner has %s: %w", addr, owner, describe(l, ok), has, errs.ErrConflict)
	}
	if err := b.putLocked(Lease{Address: addr, Owner: owner, State: Held, Since: time.Now()}); err != nil {
		return fmt.Errorf("claim %s: %w", addr, err)
	}
	return nil
}

// Release gives an address back; it cools down from then on. Only the owner can: another's
// address is an errs.ErrConflict. One that the owner does not have any more is success.
func (b *Books) Release(owner string, addr netip.Addr) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	l, ok := b.leases[addr]
	switch {
	case !ok || l.Owner == "":
		return nil
	case l.Owner != owner:
		return fmt.Errorf("release %s by %q: it is %s: %w", addr, owner, describe(l, ok), errs.ErrConflict)
	}
	if err := b.putLocked(Lease{Address: addr, State: Cooling, Since: time.Now()}); err != nil {
		return fmt.Errorf("release %s: %w", addr, err)
	}
	return nil
}

// Quarantine takes an address out of use because somebody unknown answers on it. Its owner,
// if it has one, loses it and may reserve another.
func (b *Books) Quarantine(addr netip.Addr, reason string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if l := b.leases[addr]; l.State == Quarantined {
		return nil
	}
	if err := b.putLocked(Lease{Address: addr, State: Quarantined, Since: time.Now(), Reason: reason}); err != nil {
		return fmt.Errorf("quarantine %s: %w", addr, err)
	}
	return nil
}

// Free ends a quarantine; the address cools down. It is for people.
func (b *Books) Free(addr netip.Addr) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	l, ok := b.leases[addr]
	if !ok || l.State != Quarantined {
		return fmt.Errorf("free %s: it is %s: %w", addr, describe(l, ok), errs.ErrConflict)
	}
	if err := b.putLocked(Lease{Address: addr, State: Cooling, Since: time.Now()}); err != nil {
		return fmt.Errorf("free %s: %w", addr, err)
	}
	return nil
}

// Of returns the owner's lease.
func (b *Books) Of(owner string) (Lease, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	addr, ok := b.owners[owner]
	return b.leases[addr], ok
}

// List returns all leases by address, without the cooling ones that have rested.
func (b *Books) List() []Lease {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	all := make([]Lease, 0, len(b.leases))
	for addr, l := range b.leases {
		if b.stateLocked(addr, now) != "" {
			all = append(all, l)
		}
	}
	slices.SortFunc(all, func(x, y Lease) int { return x.Address.Compare(y.Address) })
	return all
}

// putLocked writes a lease through to the store and forgets what it replaces.
//
// +checklocks:b.mu
func (b *Books) putLocked(l Lease) error {
	value, err := json.Marshal(l)
	if err != nil {
		return fmt.Errorf("encode lease: %w", err)
	}
	if err := b.cfg.Store.Apply(Change{Key: []byte(l.Address.String()), Value: value}); err != nil {
		return fmt.Errorf("write lease: %w", err)
	}
	if old := b.leases[l.Address]; old.Owner != "" {
		delete(b.owners, old.Owner)
	}
	b.leases[l.Address] = l
	if l.Owner != "" {
		b.owners[l.Owner] = l.Address
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

// lastOf is the highest address of a prefix.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 1 << (7 - bit%8)
	}
	last, _ := netip.AddrFromSlice(b)
	return last
}
