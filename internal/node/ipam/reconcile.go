package ipam

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// ReconcileInterval is how often books are compared with what is live.
const ReconcileInterval = 5 * time.Minute

// missesBeforeRelease is how many looks in a row must miss the owner of a lease before the lease
// is released.
const missesBeforeRelease = 3

// InUse is an address in use, as the machine itself tells and not the books.
type InUse struct {
	// Address is one of IPv4; others are passed over. The zero Addr says that the owner is alive
	// and its address not known: none of its leases is released.
	Address netip.Addr
	// Owner is empty where nobody knows who uses the address.
	Owner string
	// Where tells people where the address was seen, such as a container's label.
	Where string
}

// Kinds of Repair.
const (
	// Reclaimed says that a live owner's address, which was free in the books, is its own again.
	Reclaimed = "reclaimed"
	// Released says that a lease without a live owner was given back.
	Released = "released"
	// Isolated says that a free address that somebody unknown uses was put in quarantine.
	Isolated = "quarantined"
	// Conflict says that an address is in use by another than its owner in the books, or by two.
	// Nothing was taken from anybody: a person must end one of them.
	Conflict = "conflict"
)

// Repair is a difference between books and machine, and what was done about it.
type Repair struct {
	Kind    string
	Address netip.Addr
	// Owner is who has the address after the repair, or had it before its release.
	Owner string
	// Where tells where the address was seen in use; it may be empty.
	Where string
	// Detail is for people.
	Detail string
}

// ReconcilerConfig says what is compared.
type ReconcilerConfig struct {
	Allocator *Allocator
	// Live tells all addresses in use on this machine. It must be conservative: what may be in
	// use, such as the address of what is being made or removed, counts. If it fails, or knows
	// only a part and so must fail, nothing is decided.
	Live func(ctx context.Context) ([]InUse, error)
	// OnRepair is told of each repair, with no lock held; nil is fine.
	OnRepair func(ctx context.Context, r Repair)
	// Every is how far apart looks are that count as one miss each: looks in between repair, but
	// miss nothing. Zero means ReconcileInterval.
	Every time.Duration
	Log   *slog.Logger
	// Metrics may be nil.
	Metrics prometheus.Registerer
}

// Reconciler brings books and machine together again where they differ. It takes nothing from
// anybody who lives.
type Reconciler struct {
	cfg     ReconcilerConfig
	log     *slog.Logger
	metrics *metrics

	runMu  sync.Mutex            // one look at a time
	misses map[netip.Addr]missed // +checklocks:runMu
}

// missed is a lease whose owner was not seen alive.
type missed struct {
	owner string
	times int       // at most missesBeforeRelease
	last  time.Time // of the last look that counted
}

// NewReconciler checks the configuration. It starts nothing.
func NewReconciler(cfg ReconcilerConfig) (*Reconciler, error) {
	if cfg.Allocator == nil || cfg.Live == nil || cfg.Log == nil {
		return nil, fmt.Errorf("reconciler of addresses: books, what is live and a logger are needed: %w", errs.ErrInvalid)
	}
	if cfg.Every <= 0 {
		cfg.Every = ReconcileInterval
	}
	m, err := newMetrics(cfg.Metrics, cfg.Allocator)
	if err != nil {
		return nil, fmt.Errorf("register metrics of addresses: %w", err)
	}
	return &Reconciler{cfg: cfg, log: cfg.Log.With(telemetry.Component, "ipam"), metrics: m, misses: map[netip.Addr]missed{}}, nil
}

// Run looks at intervals of Config.Every until ctx ends, for the first time after one of them:
// whoever calls it has looked before anything was handed out.
func (r *Reconciler) Run(ctx context.Context) error {
	tick := time.NewTicker(r.cfg.Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if _, err := r.Reconcile(ctx); err != nil && ctx.Err() == nil {
			r.log.WarnContext(ctx, "addresses not compared with what is live in full", telemetry.Error, err)
		}
	}
}

// Reconcile compares the lease table with the addresses in use once, and repairs the table. If the addresses in use
// are unknown, it changes nothing. A repair that cannot be written does not stop the others; its error is returned
// beside them, and the next run retries.
func (r *Reconciler) Reconcile(ctx context.Context) ([]Repair, error) {
	repairs, err := r.compare(ctx)
	for _, p := range repairs {
		r.report(ctx, p)
	}
	result := "done"
	if err != nil {
		result = "failed"
	}
	r.metrics.reconciles.WithLabelValues(result).Inc()
	return repairs, err
}

func (r *Reconciler) compare(ctx context.Context) (repairs []Repair, err error) {
	r.runMu.Lock()
	defer r.runMu.Unlock()
	// The books first: what they gain from here on may be missing in what is live, and what they
	// lose may still be in it. Neither is then taken for a difference.
	leases := r.cfg.Allocator.List()
	live, err := r.cfg.Live(ctx)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("addresses in use cannot be told, nothing is decided: %w", err)
	}
	v := newComparison(leases, live)
	var failures []error
	note := func(p Repair, err error) {
		failures = append(failures, err)
		if err == nil && p.Kind != "" {
			repairs = append(repairs, p)
		}
	}
	r.dropMisses(v)
	for _, lease := range leases { // first, so that their owners can have the addresses that they use
		if lease.Owner != "" && r.missed(lease, v) {
			note(r.release(lease))
		}
	}
	conflicts := 0
	for _, addr := range v.addresses() {
		p, err := r.repair(addr, v.leases[addr], v.users[addr])
		if p.Kind == Conflict {
			conflicts++
		}
		note(p, err)
	}
	r.metrics.conflicts.Set(float64(conflicts))
	return repairs, errors.Join(failures...)
}

// comparison is books and machine at one moment.
type comparison struct {
	leases         map[netip.Addr]Lease
	users          map[netip.Addr][]InUse
	withoutAddress map[string]bool // owners whose address is not known
}

func newComparison(leases []Lease, live []InUse) *comparison {
	v := &comparison{leases: map[netip.Addr]Lease{}, users: map[netip.Addr][]InUse{}, withoutAddress: map[string]bool{}}
	for _, l := range leases {
		v.leases[l.Address] = l
	}
	for _, u := range live {
		switch addr := u.Address.Unmap(); {
		case addr.Is4():
			v.users[addr] = append(v.users[addr], u)
		case !addr.IsValid() && u.Owner != "":
			v.withoutAddress[u.Owner] = true
		}
	}
	return v
}

func (v *comparison) addresses() []netip.Addr {
	return slices.SortedFunc(maps.Keys(v.users), netip.Addr.Compare)
}

// forget drops the misses of leases that there are no more.
//
// +checklocks:r.runMu
func (r *Reconciler) dropMisses(v *comparison) {
	for addr, m := range r.misses {
		if v.leases[addr].Owner != m.owner {
			delete(r.misses, addr)
		}
	}
}

// missed counts a lease without a live owner, and reports whether that is enough to release it.
// Whoever uses the address counts as alive: a lease is not taken because of a conflict.
//
// +checklocks:r.runMu
func (r *Reconciler) missed(l Lease, v *comparison) bool {
	if v.withoutAddress[l.Owner] || len(v.users[l.Address]) > 0 {
		delete(r.misses, l.Address)
		return false
	}
	m, now := r.misses[l.Address], time.Now()
	if m.times == 0 || now.Sub(m.last) >= r.cfg.Every-r.cfg.Every/10 { // tickers are not that exact
		m = missed{owner: l.Owner, times: min(m.times+1, missesBeforeRelease), last: now}
		r.misses[l.Address] = m
	}
	return m.times == missesBeforeRelease
}

// release gives back a lease that has been missed often enough. One that changed meanwhile
// stays.
func (r *Reconciler) release(l Lease) (Repair, error) {
	done, err := r.cfg.Allocator.releaseUnchanged(l)
	if err != nil || !done {
		return Repair{}, err
	}
	return Repair{
		Kind: Released, Address: l.Address, Owner: l.Owner,
		Detail: fmt.Sprintf("it was %s since %s, and nobody was seen to use it %d times in a row", l.State, l.Since.UTC().Format(time.RFC3339), missesBeforeRelease),
	}, nil
}

// settle brings an address that is in use into the books. The zero Repair says that all is well.
func (r *Reconciler) repair(addr netip.Addr, l Lease, users []InUse) (Repair, error) {
	owners, where := ownersOf(users)
	p := Repair{Address: addr, Owner: l.Owner, Where: where}
	books := "free"
	if l.State != "" {
		books = describe(l, true)
	}
	switch {
	case len(owners) > 1 || (len(owners) == 1 && l.Owner != "" && owners[0] != l.Owner):
		p.Kind, p.Detail = Conflict, fmt.Sprintf("in use by %s; in the books it is %s", strings.Join(owners, " and "), books)
	case len(owners) == 1 && l.Owner == "":
		return r.reclaim(p, owners[0], l, books)
	case len(owners) == 0 && l.State == "":
		return r.isolate(p)
	default:
		return Repair{}, nil
	}
	return p, nil
}

// reclaim gives a live owner's address back to it in the books, unless they have changed since
// they were looked at: the owner may have come, or gone, in between.
func (r *Reconciler) reclaim(p Repair, owner string, was Lease, books string) (Repair, error) {
	p.Kind, p.Owner, p.Detail = Reclaimed, owner, "in the books it was "+books
	done, err := r.cfg.Allocator.claimUnchanged(owner, p.Address, was)
	if err == nil && !done {
		return Repair{}, nil
	}
	if errors.Is(err, errs.ErrConflict) {
		p.Kind, p.Detail = Conflict, errs.Text(err)
		return p, nil
	}
	return p, err
}

// isolate keeps an address that somebody unknown uses from being handed out.
func (r *Reconciler) isolate(p Repair) (Repair, error) {
	p.Kind, p.Detail = Isolated, "somebody unknown uses it"
	done, err := r.cfg.Allocator.quarantineFree(p.Address, strings.TrimSpace("in use by somebody unknown "+p.Where))
	if !done {
		return Repair{}, err
	}
	return p, err
}

// ownersOf lists the known users of an address, and where it was seen in use.
func ownersOf(users []InUse) (owners []string, where string) {
	var places []string
	for _, u := range users {
		if u.Owner != "" && !slices.Contains(owners, u.Owner) {
			owners = append(owners, u.Owner)
		}
		if u.Where != "" && !slices.Contains(places, u.Where) {
			places = append(places, u.Where)
		}
	}
	slices.Sort(owners)
	return owners, strings.Join(places, ", ")
}

// report makes a repair known.
func (r *Reconciler) report(ctx context.Context, p Repair) {
	log := r.log.With(telemetry.Kind, p.Kind, telemetry.Address, p.Address, telemetry.UID, p.Owner, "where", p.Where, telemetry.Reason, p.Detail)
	if p.Kind == Conflict {
		log.ErrorContext(ctx, "address in use by another than its owner in the books; nothing is taken from anybody")
	} else {
		log.WarnContext(ctx, "address repaired")
	}
	r.metrics.repairs.WithLabelValues(p.Kind).Inc()
	if r.cfg.OnRepair != nil {
		r.cfg.OnRepair(ctx, p)
	}
}

// claimUnchanged writes an owner's address into the books if they still have of it what they had when
// they were looked at; the zero Lease stands for a free one.
func (b *Allocator) claimUnchanged(owner string, addr netip.Addr, was Lease) (done bool, err error) {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	if l, _ := b.At(addr); l.Owner != was.Owner || l.State != was.State || !l.Since.Equal(was.Since) {
		return false, nil
	}
	if err := b.claim(owner, addr); err != nil {
		return false, err
	}
	return true, nil
}

// releaseUnchanged gives back a lease if it is still as it was when it was looked at.
func (b *Allocator) releaseUnchanged(was Lease) (done bool, err error) {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	l, ok := b.At(was.Address)
	if !ok || l.Owner != was.Owner || l.State != was.State || !l.Since.Equal(was.Since) {
		return false, nil
	}
	if err := b.write(Lease{Address: l.Address, State: Cooling, Since: time.Now()}); err != nil {
		return false, fmt.Errorf("release %s: %w", l.Address, err)
	}
	return true, nil
}

// quarantineFree takes an address out of use if it is free and might be handed out.
func (b *Allocator) quarantineFree(addr netip.Addr, reason string) (done bool, err error) {
	b.writeMu.Lock()
	defer b.writeMu.Unlock()
	_, excluded := b.excluded[addr]
	if _, ok := b.At(addr); ok || excluded || !b.cfg.Subnet.Contains(addr) || b.isUnread(addr) {
		return false, nil
	}
	if err := b.write(Lease{Address: addr, State: Quarantined, Since: time.Now(), Reason: reason}); err != nil {
		return false, fmt.Errorf("quarantine %s: %w", addr, err)
	}
	return true, nil
}
