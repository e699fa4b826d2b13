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

// ReconcileInterval is the interval between comparisons of the lease table with addresses in use.
const ReconcileInterval = 5 * time.Minute

// missesBeforeRelease is the number of consecutive comparisons without the owner before a lease is
// released.
const missesBeforeRelease = 3

// InUse is an address in use on this host, independent of the lease table.
type InUse struct {
	// Address is IPv4; others are ignored. The zero Addr means that the owner runs at an unknown
	// address: none of its leases is released.
	Address netip.Addr
	// Owner is empty if unknown.
	Owner string
	// Where describes for operators where the address was seen, such as a container label.
	Where string
}

// Kinds of Repair.
const (
	// Reclaimed means that a running owner's address, which was free, is leased to it again.
	Reclaimed = "reclaimed"
	// Released means that a lease without a running owner was released.
	Released = "released"
	// Isolated means that a free address in use by an unknown owner was quarantined.
	Isolated = "quarantined"
	// Conflict means that an address is in use by a non-owner, or by two. Leases are unchanged: an
	// operator must end one of the users.
	Conflict = "conflict"
)

// Repair is a difference between lease table and host, and the correction.
type Repair struct {
	Kind    string
	Address netip.Addr
	// Owner has the address after the repair, or had it before its release.
	Owner string
	// Where is where the address was seen in use; it may be empty.
	Where string
	// Detail is for operators.
	Detail string
}

// ReconcilerConfig configures a Reconciler.
type ReconcilerConfig struct {
	Allocator *Allocator
	// Live lists all addresses on this host that may be in use, including those of sandboxes being
	// created or removed. An incomplete list must be an error; then nothing changes.
	Live func(ctx context.Context) ([]InUse, error)
	// OnRepair receives each repair, with no lock held; it may be nil.
	OnRepair func(ctx context.Context, r Repair)
	// Every is the least time between two counted misses; comparisons in between only repair.
	// Zero means ReconcileInterval.
	Every time.Duration
	Log   *slog.Logger
	// Metrics may be nil.
	Metrics prometheus.Registerer
}

// Reconciler corrects the lease table where it differs from the host. It never takes an address from
// a running owner.
type Reconciler struct {
	cfg     ReconcilerConfig
	log     *slog.Logger
	metrics *metrics

	runMu  sync.Mutex            // one comparison at a time
	misses map[netip.Addr]missed // +checklocks:runMu
}

// missed counts the comparisons that did not find a lease's owner.
type missed struct {
	owner string
	times int       // at most missesBeforeRelease
	last  time.Time // last counted miss
}

// NewReconciler checks the configuration. It starts nothing.
func NewReconciler(cfg ReconcilerConfig) (*Reconciler, error) {
	if cfg.Allocator == nil || cfg.Live == nil || cfg.Log == nil {
		return nil, fmt.Errorf("address reconciler: allocator, live and logger required: %w", errs.ErrInvalid)
	}
	if cfg.Every <= 0 {
		cfg.Every = ReconcileInterval
	}
	m, err := newMetrics(cfg.Metrics, cfg.Allocator.Counts)
	if err != nil {
		return nil, fmt.Errorf("register address metrics: %w", err)
	}
	return &Reconciler{cfg: cfg, log: cfg.Log.With(telemetry.Component, "ipam"), metrics: m, misses: map[netip.Addr]missed{}}, nil
}

// Run reconciles at intervals of Config.Every until ctx ends, first after one interval: the caller has
// reconciled before the first lease.
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
			r.log.WarnContext(ctx, "cannot reconcile all addresses", telemetry.Error, err)
		}
	}
}

// Reconcile compares the lease table with the addresses in use once, and repairs the table. If the addresses in use
// are unknown, it changes nothing. A repair that cannot be written does not stop the others; its error is returned
// beside them, and the next run retries.
func (r *Reconciler) Reconcile(ctx context.Context) ([]Repair, error) {
	return r.ReconcileWith(ctx, r.cfg.Live)
}

// ReconcileWith is Reconcile with another list of the addresses in use, as of the configuration.
func (r *Reconciler) ReconcileWith(ctx context.Context, live func(context.Context) ([]InUse, error)) ([]Repair, error) {
	repairs, err := r.compare(ctx, live)
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

func (r *Reconciler) compare(ctx context.Context, listLive func(context.Context) ([]InUse, error)) (repairs []Repair, err error) {
	r.runMu.Lock()
	defer r.runMu.Unlock()
	// Leases first: a later change of the lease table may be missing from the live list, and is not
	// taken for a difference.
	leases := r.cfg.Allocator.List()
	live, err := listLive(ctx)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("list addresses in use: %w", err)
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
	for _, lease := range leases { // first, so that their owners can get the addresses that they use
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

// comparison is the lease table and the host at one moment.
type comparison struct {
	leases         map[netip.Addr]Lease
	users          map[netip.Addr][]InUse
	withoutAddress map[string]bool // owners whose address is unknown
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

// dropMisses drops the misses of leases that no longer exist.
//
// +checklocks:r.runMu
func (r *Reconciler) dropMisses(v *comparison) {
	for addr, m := range r.misses {
		if v.leases[addr].Owner != m.owner {
			delete(r.misses, addr)
		}
	}
}

// missed counts a lease without a running owner, and reports whether to release it. Any user of the
// address counts as running: a conflict does not release a lease.
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

func (r *Reconciler) release(l Lease) (Repair, error) {
	done, err := r.cfg.Allocator.releaseUnchanged(l)
	if err != nil || !done {
		return Repair{}, err
	}
	return Repair{
		Kind: Released, Address: l.Address, Owner: l.Owner,
		Detail: fmt.Sprintf("was %s since %s, and unused in %d consecutive comparisons", l.State, l.Since.UTC().Format(time.RFC3339), missesBeforeRelease),
	}, nil
}

// repair corrects the lease of an address in use. The zero Repair means that it was correct.
func (r *Reconciler) repair(addr netip.Addr, l Lease, users []InUse) (Repair, error) {
	owners, where := ownersOf(users)
	p := Repair{Address: addr, Owner: l.Owner, Where: where}
	was := "free"
	if l.State != "" {
		was = describe(l, true)
	}
	switch {
	case len(owners) > 1 || (len(owners) == 1 && l.Owner != "" && owners[0] != l.Owner):
		p.Kind, p.Detail = Conflict, fmt.Sprintf("in use by %s; the lease table has it %s", strings.Join(owners, " and "), was)
	case len(owners) == 1 && l.Owner == "":
		return r.reclaim(p, owners[0], l, was)
	case len(owners) == 0 && l.State == "":
		return r.isolate(p)
	default:
		return Repair{}, nil
	}
	return p, nil
}

// reclaim leases an address to the running owner that uses it, unless the lease has changed since
// the comparison.
func (r *Reconciler) reclaim(p Repair, owner string, old Lease, was string) (Repair, error) {
	p.Kind, p.Owner, p.Detail = Reclaimed, owner, "the lease table had it "+was
	done, err := r.cfg.Allocator.claimUnchanged(owner, p.Address, old)
	if err == nil && !done {
		return Repair{}, nil
	}
	if errors.Is(err, errs.ErrConflict) {
		p.Kind, p.Detail = Conflict, errs.Text(err)
		return p, nil
	}
	return p, err
}

func (r *Reconciler) isolate(p Repair) (Repair, error) {
	p.Kind, p.Detail = Isolated, "in use by an unknown owner"
	done, err := r.cfg.Allocator.quarantineFree(p.Address, strings.TrimSpace("in use by an unknown owner: "+p.Where))
	if !done {
		return Repair{}, err
	}
	return p, err
}

// ownersOf lists the known users of an address, and where it was seen.
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

func (r *Reconciler) report(ctx context.Context, p Repair) {
	log := r.log.With(telemetry.Kind, p.Kind, telemetry.Address, p.Address, telemetry.UID, p.Owner, "where", p.Where, telemetry.Reason, p.Detail)
	if p.Kind == Conflict {
		log.ErrorContext(ctx, "address in use by a non-owner; leases unchanged")
	} else {
		log.WarnContext(ctx, "address repaired")
	}
	r.metrics.repairs.WithLabelValues(p.Kind).Inc()
	if r.cfg.OnRepair != nil {
		r.cfg.OnRepair(ctx, p)
	}
}

// claimUnchanged claims an address if its lease is still as compared; the zero Lease is a free
// address.
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

// quarantineFree quarantines an address if it is free and could be leased.
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
