package picker

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// ErrNone reports that a pool has no ready member, and none being created that no other claim waits
// for: a cold start is faster.
var ErrNone = fmt.Errorf("no member of the warm pool is ready or about to be: %w", errs.ErrNotFound)

// ErrLost reports that a lease's member cannot be had: another writer was first, the member no longer
// fits, or the lease has ended. Nothing was written; the claim reserves another.
var ErrLost = fmt.Errorf("the member was lost to another writer: %w", errs.ErrConflict)

// maxOrphans bounds the orphans that wait for their removal.
const maxOrphans = 1024

// Writer reads and writes Sandboxes on the API server.
type Writer interface {
	Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
}

// Config is what New needs.
type Config struct {
	// Writer reads and writes through the API server, never a cache. Required.
	Writer Writer
	// Identity distinguishes this process from others that claim members of the same pools: each prefers members of its own.
	// Claims record it. Empty: the process has no preference, and records none.
	Identity string
	// Log; nil discards.
	Log *slog.Logger
	// Metrics; nil registers none.
	Metrics prometheus.Registerer
}

// Picker leases members to claims. It is safe for concurrent use.
type Picker struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	orphans chan *agents.Sandbox

	mu sync.Mutex
	// +checklocks:mu
	members map[types.UID]*member
	// +checklocks:mu
	groups map[key]*group
	// +checklocks:mu
	tombstones tombstones
	// +checklocks:mu
	rivals rivals
	// +checklocks:mu
	lastSeq uint64 // of the newest member
	// +checklocks:mu
	lastClaim uint64
	// +checklocks:mu
	lastWarmClaim time.Time
}

// New returns a picker without members; Observe adds them.
func New(cfg Config) (*Picker, error) {
	if cfg.Writer == nil {
		return nil, fmt.Errorf("picker: Writer is required: %w", errs.ErrInvalid)
	}
	if cfg.Log == nil {
		cfg.Log = telemetry.Discard()
	}
	m, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, fmt.Errorf("register the picker's metrics: %w", err)
	}
	return &Picker{
		cfg: cfg, log: cfg.Log.With(telemetry.Component, "picker"), metrics: m, orphans: make(chan *agents.Sandbox, maxOrphans),
		members: map[types.UID]*member{}, groups: map[key]*group{}, tombstones: tombstones{set: map[types.UID]struct{}{}},
		rivals: rivals{self: cfg.Identity, seen: map[string]time.Time{}},
	}, nil
}

// noteLocked records a claim, and whether its pool has another ready member.
//
// +checklocks:p.mu
func (p *Picker) noteLocked(more bool) {
	p.lastWarmClaim = time.Time{}
	if more {
		p.lastWarmClaim = time.Now()
	}
}

// LastWarmClaim returns the time of the last claim, of any process, that left ready members in its pool; refills are
// delayed after it. It is zero without such a claim, or if the last claim emptied its pool.
func (p *Picker) LastWarmClaim() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lastWarmClaim
}

// Ready counts the members of a template's revision that can be leased at once.
func (p *Picker) Ready(pool types.UID, template types.NamespacedName, revision string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if g := p.groups[key{pool, template, revision}]; g != nil {
		return g.ready
	}
	return 0
}

// Orphans returns members that were written for a claim whose caller got an error, or had left: no caller
// uses them. It holds at most maxOrphans; more are dropped, and end by their timeouts.
func (p *Picker) Orphans() <-chan *agents.Sandbox { return p.orphans }

// Pick is one claim on a pool: its position among those that wait, which it keeps from lease to lease.
// One goroutine uses it.
type Pick struct {
	p        *Picker
	pool     types.UID
	template types.NamespacedName
	waiter   waiter
	// waited is of the last Reserve, everWaited of all.
	waited, everWaited bool
	unsure             int // writes of unknown outcome
}

// waiter is a claim in a queue. All but looked is guarded by the picker's mutex while it waits.
type waiter struct {
	number uint64
	key    key                // of the group that it waits in
	at     *list.Element      // while it waits
	result chan *member       // receives the member, or nil, that ends the wait
	looked map[types.UID]bool // outdated members that it has read again
}

// Begin starts a claim on the members of a template in the warm pool with this UID, behind all claims that began before.
func (p *Picker) Begin(pool types.UID, template types.NamespacedName) *Pick {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lastClaim++
	return &Pick{p: p, pool: pool, template: template, waiter: waiter{number: p.lastClaim}}
}

// Reserve leases the next ready member of a revision, which must be the template's as it is now. While a
// member that is being created is left for it, it waits until ctx ends. If Waited reports true
// afterwards, the caller reads the template again before it commits, or starts a sandbox cold.
//
// The error is [ErrNone] where a cold start is faster, and an errs.ErrTimeout when ctx ended.
func (k *Pick) Reserve(ctx context.Context, revision string) (*Lease, error) {
	if k.pool == "" || revision == "" {
		return nil, fmt.Errorf("reserve a member: a pool and a revision are required: %w", errs.ErrInvalid)
	}
	m, err := k.p.next(ctx, key{k.pool, k.template, revision}, k)
	if err != nil {
		k.count(err)
		return nil, err
	}
	return newLease(ctx, k, m, revision), nil
}

// Waited reports whether the last Reserve waited.
func (k *Pick) Waited() bool { return k.waited }

// count records how a claim ended; one that lost a member continues.
func (k *Pick) count(err error) {
	result := resultFailed
	switch {
	case errors.Is(err, ErrLost):
		return
	case errors.Is(err, ErrNone):
		result = resultNone
	case err == nil && k.everWaited:
		result = resultWaited
	case err == nil:
		result = resultWarm
	}
	k.p.metrics.picks.WithLabelValues(result).Inc()
}

// timeout is the error of a claim whose ctx has ended.
func timeout(ctx context.Context, cause error) error {
	if cause == nil {
		cause = context.Cause(ctx)
	}
	return fmt.Errorf("lease a member: %w: %w", errs.ErrTimeout, cause)
}

// next returns a member that this claim holds from now on.
func (p *Picker) next(ctx context.Context, k key, claim *Pick) (m *member, err error) {
	claim.waited = false
	for {
		if ctx.Err() != nil {
			return nil, timeout(ctx, nil)
		}
		m, look, waits := p.take(k, &claim.waiter)
		switch {
		case waits:
			claim.waited, claim.everWaited = true, true
			return p.await(ctx, &claim.waiter)
		case m == nil:
			return nil, ErrNone
		case !look:
			return m, nil
		}
		tried := p.seen(m)
		if err := p.fetch(ctx, m); err != nil {
			p.setAside(m, tried)
			return nil, err
		}
		p.putBack(m)
	}
}

// take holds the next ready member, or an outdated one for the claim to read first, or makes the claim
// wait. Otherwise there is no member for it.
func (p *Picker) take(k key, t *waiter) (m *member, look, waits bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rivals.expire(time.Now()) {
		p.rerankLocked()
	}
	g := p.groupLocked(k)
	if m := g.best(); m != nil {
		p.putLocked(m, held)
		p.noteLocked(g.ready > 0)
		return m, false, false
	}
	p.noteLocked(false)
	for e := g.outdated.Front(); e != nil; e = e.Next() {
		if m := of[*member](e); !t.looked[m.seen.UID] {
			if t.looked == nil {
				t.looked = map[types.UID]bool{}
			}
			t.looked[m.seen.UID] = true
			p.putLocked(m, held)
			return m, true, false
		}
	}
	g.join(t, k)
	p.balanceLocked(k)
	return nil, false, t.at != nil
}

// await blocks until the claim's wait ends.
func (p *Picker) await(ctx context.Context, t *waiter) (*member, error) {
	start := time.Now()
	defer func() { p.metrics.wait.Observe(time.Since(start).Seconds()) }()
	select {
	case m := <-t.result:
		if m == nil {
			return nil, ErrNone
		}
		return m, nil
	case <-ctx.Done():
		p.giveUp(t)
		return nil, timeout(ctx, nil)
	}
}

// giveUp ends a wait. A member that the claim got meanwhile goes to the next claim.
func (p *Picker) giveUp(t *waiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.at != nil {
		k := t.key
		p.groupLocked(k).leave(t, nil)
		p.balanceLocked(k)
		return
	}
	if m := <-t.result; m != nil {
		p.putBackLocked(m)
	}
}

// putBack ends the hold on a member: it returns to the place of its last seen state.
func (p *Picker) putBack(m *member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.putBackLocked(m)
}

// +checklocks:p.mu
func (p *Picker) putBackLocked(m *member) {
	to := placeOf(m.seen)
	if m.ended {
		to = past
	}
	p.putLocked(m, to)
}
