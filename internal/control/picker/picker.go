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

// ErrNone says that a pool has nothing ready and nothing in the making that is not spoken
// for: a sandbox started cold is there sooner.
var ErrNone = fmt.Errorf("no member of the warm pool is ready or about to be: %w", errs.ErrNotFound)

// Writer is what a picker needs of the API server itself.
type Writer interface {
	Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
}

// Config is what New needs.
type Config struct {
	// Writer asks the API server itself, never a cache. Required.
	Writer Writer
	// Orphaned, if set, is told of a member that was adopted for a caller who was told
	// otherwise, or had left before it was known: nobody will use it. It must not block, nor
	// change the object.
	Orphaned func(*agents.Sandbox)
	// Log; nil discards.
	Log *slog.Logger
	// Metrics; nil keeps them to itself.
	Metrics prometheus.Registerer
}

// Request asks for a member of a pool.
type Request struct {
	// Pool is the UID of the warm pool.
	Pool types.UID
	// Current tells the revision that the pool's template has now, by a read of the API server
	// that began after the call. It is asked before the first try and again after any wait.
	Current func(ctx context.Context) (revision string, err error)
	// Adopt makes of a member what is to be written; build it on pool.Adopt. It is called anew
	// for each try, with a copy of its own.
	//
	// What is written is conditional on the version of that copy, whatever Adopt does to it.
	Adopt func(member *agents.Sandbox) *agents.Sandbox
}

// Picker hands out members. All of its methods may be called at any time by anyone.
type Picker struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics

	mu sync.Mutex
	// +checklocks:mu
	members map[types.UID]*member
	// +checklocks:mu
	groups map[key]*group
	// +checklocks:mu
	tombstones tombstones
	// +checklocks:mu
	lastSeq uint64 // the last member's
	// +checklocks:mu
	tickets uint64 // the last claim's
	// +checklocks:mu
	served time.Time
}

// New returns a picker that knows no members until Observe tells it of them.
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
		cfg: cfg, log: cfg.Log.With(telemetry.Component, "picker"), metrics: m,
		members: map[types.UID]*member{}, groups: map[key]*group{}, tombstones: tombstones{set: map[types.UID]struct{}{}},
	}, nil
}

// noteLocked notes that a claim came, and whether the next would find a member, too.
// +checklocks:p.mu
func (p *Picker) noteLocked(more bool) {
	p.served = time.Time{}
	if more {
		p.served = time.Now()
	}
}

// Served tells when a claim was last served of a stock that has not run out: what only refills may
// wait until no more claims come. It is zero if there was none, or the last one found the end of
// its stock.
func (p *Picker) Served() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.served
}

// Ready tells how many members of a revision could be handed out at once.
func (p *Picker) Ready(pool types.UID, revision string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if g := p.groups[key{pool, revision}]; g != nil {
		return g.ready
	}
	return 0
}

// waiter is one claim's place among those who wait. All but looked and unsure is guarded by
// the picker's mutex while the claim waits.
type waiter struct {
	number uint64
	key    key                // of the group that it waits in
	at     *list.Element      // while it waits
	bell   chan *member       // gets what a wait ended with
	looked map[types.UID]bool // members behind that it has read anew
	unsure int                // writes of its own of unknown outcome
}

// Pick returns a member of the revision that the template has now, as it was written: the
// caller's alone. It waits, until ctx ends, while a member in the making is left for it.
//
// The error is [ErrNone] where a sandbox must be started cold; an errs.ErrTimeout when ctx
// ended; an errs.ErrUnavailable when the API server did not tell what became of a write. All
// of them mean that the caller owns nothing. What Current returns is passed on.
func (p *Picker) Pick(ctx context.Context, req Request) (*agents.Sandbox, error) {
	if req.Pool == "" || req.Current == nil || req.Adopt == nil {
		return nil, fmt.Errorf("pick a member: Pool, Current and Adopt are required: %w", errs.ErrInvalid)
	}
	s, waited, err := p.pick(ctx, &req, p.ticket())
	result := resultFailed
	switch {
	case errors.Is(err, ErrNone):
		result = resultNone
	case err == nil && waited:
		result = resultWaited
	case err == nil:
		result = resultWarm
	}
	p.metrics.picks.WithLabelValues(result).Inc()
	return s, err
}

func (p *Picker) ticket() *waiter {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tickets++
	return &waiter{number: p.tickets}
}

func (p *Picker) pick(ctx context.Context, req *Request, t *waiter) (s *agents.Sandbox, everWaited bool, err error) {
	revision, err := current(ctx, req)
	if err != nil {
		return nil, false, err
	}
	for {
		m, waited, err := p.next(ctx, key{req.Pool, revision}, t)
		everWaited = everWaited || waited
		if waited && (err == nil || errors.Is(err, ErrNone)) {
			now, failed := current(ctx, req)
			if failed != nil || now != revision {
				p.putBack(m)
				revision, err = now, failed
				if failed == nil {
					continue
				}
			}
		}
		if err != nil {
			return nil, everWaited, err
		}
		if s, err := p.adopt(ctx, req, t, m, revision); s != nil || err != nil {
			return s, everWaited, err
		}
	}
}

func current(ctx context.Context, req *Request) (string, error) {
	revision, err := req.Current(ctx)
	switch {
	case err != nil && ctx.Err() != nil:
		return "", timeout(ctx, err)
	case err != nil:
		return "", err
	case revision == "":
		return "", fmt.Errorf("the template of pool %s has no revision: %w", req.Pool, errs.ErrInvalid)
	}
	return revision, nil
}

// timeout is the error of a claim whose ctx has ended.
func timeout(ctx context.Context, cause error) error {
	if cause == nil {
		cause = context.Cause(ctx)
	}
	return fmt.Errorf("pick a member: %w: %w", errs.ErrTimeout, cause)
}

// next returns a member that is held for this claim from now on. waited tells that the claim
// has been waiting for it, or for its [ErrNone].
func (p *Picker) next(ctx context.Context, k key, t *waiter) (m *member, waited bool, err error) {
	for {
		m, look, waits := p.take(k, t)
		switch {
		case waits:
			m, err = p.await(ctx, t)
			return m, true, err
		case m == nil:
			return nil, false, ErrNone
		case !look:
			return m, false, nil
		}
		tried := p.seen(m)
		if err := p.fetch(ctx, m); err != nil {
			p.setAside(m, tried)
			return nil, false, err
		}
		p.putBack(m)
	}
}

// take holds the member whose turn it is, or one that is to be looked at first, or has the
// ticket wait. None of them: there is nothing for it.
func (p *Picker) take(k key, t *waiter) (m *member, look, waits bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.groupLocked(k)
	if m := g.best(); m != nil {
		p.putLocked(m, held)
		p.noteLocked(g.ready > 0)
		return m, false, false
	}
	p.noteLocked(false)
	for e := g.behind.Front(); e != nil; e = e.Next() {
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

// await blocks until the ticket's wait ends.
func (p *Picker) await(ctx context.Context, t *waiter) (*member, error) {
	start := time.Now()
	defer func() { p.metrics.wait.Observe(time.Since(start).Seconds()) }()
	select {
	case m := <-t.bell:
		if m == nil {
			return nil, ErrNone
		}
		return m, nil
	case <-ctx.Done():
		p.giveUp(t)
		return nil, timeout(ctx, nil)
	}
}

// giveUp ends a wait. What the claim was given in the same moment goes to the next.
func (p *Picker) giveUp(t *waiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.at != nil {
		k := t.key
		p.groupLocked(k).leave(t, nil)
		p.balanceLocked(k)
		return
	}
	if m := <-t.bell; m != nil {
		p.putBackLocked(m)
	}
}

// putBack ends the hold on a member: it is where it belongs as it was last seen. Of nil it
// does nothing.
func (p *Picker) putBack(m *member) {
	if m == nil {
		return
	}
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
