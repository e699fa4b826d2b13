package node

import (
	"context"
	"fmt"
	"sync"

	"github.com/barchan-dev/barchan/internal/errs"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

// unit is one sandbox on the node.
type unit struct {
	ref sandbox.Ref
	id  sandbox.ID

	// turn holds a token while nobody changes the sandbox.
	turn chan struct{}

	mu      sync.Mutex
	row     *row               // +checklocks:mu
	seen    sandbox.Observed   // +checklocks:mu
	gone    bool               // +checklocks:mu
	claimed bool               // +checklocks:mu
	cancel  context.CancelFunc // +checklocks:mu
	unwatch context.CancelFunc // +checklocks:mu
	unstore context.CancelFunc // +checklocks:mu
	// interrupted is set while an interruption waits for its turn.
	interrupted bool // +checklocks:mu
	// retrying is set while Run tries again and again to remove the unit.
	retrying bool // +checklocks:mu
}

func newUnit(ref sandbox.Ref, seen sandbox.Observed) *unit {
	u := &unit{ref: ref, id: sandbox.IDOf(ref.UID), turn: make(chan struct{}, 1), seen: seen}
	u.turn <- struct{}{}
	return u
}

// take waits for the unit's turn. The context that it returns ends when somebody interrupts;
// done gives the turn back.
func (u *unit) take(ctx context.Context) (_ context.Context, done func(), err error) {
	select {
	case <-u.turn:
	case <-ctx.Done():
		return nil, nil, fmt.Errorf("wait for sandbox %s/%s: %w: %w", u.ref.Namespace, u.ref.Name, context.Cause(ctx), errs.ErrUnavailable)
	}
	ctx, cancel := context.WithCancel(ctx)
	u.mu.Lock()
	u.cancel, u.interrupted = cancel, false
	u.mu.Unlock()
	return ctx, func() {
		u.mu.Lock()
		u.cancel = nil
		u.mu.Unlock()
		cancel()
		u.turn <- struct{}{}
	}, nil
}

// busy reports whether somebody has the unit's turn.
func (u *unit) busy() bool { return len(u.turn) == 0 }

// interrupt ends what is being done to the unit, if anything.
func (u *unit) interrupt() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.interrupted = true
	if u.cancel != nil {
		u.cancel()
	}
}

// unlessInterrupted makes of a turn's context one that ends when somebody interrupts, and not
// when whoever took the turn gives up.
func (u *unit) unlessInterrupted(turn context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(turn))
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.interrupted {
		cancel()
	}
	u.cancel = cancel
	return ctx, cancel
}

func (u *unit) observed() sandbox.Observed {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.seen
}

// see changes what is observed and reports whether that is a change.
func (u *unit) see(change func(*sandbox.Observed)) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	before := u.seen
	change(&u.seen)
	return before != u.seen
}

// current is the unit's row of the journal; nil where nothing was begun.
func (u *unit) current() *row {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.row
}

func (u *unit) setRow(r *row) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.row = r
}

// claim notes that somebody asks for the sandbox, so that it is no orphan.
func (u *unit) claim() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.claimed = true
}

// doubt takes claim back: whoever asked for the sandbox may not know it any more.
func (u *unit) doubt() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.claimed = false
}

// retries notes whether the unit's removal is tried again by itself, and reports whether that is
// a change.
func (u *unit) retries(on bool) (changed bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	changed = u.retrying != on
	u.retrying = on
	return changed
}

func (u *unit) isClaimed() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.claimed
}

// bury marks a unit that is no longer the one of its sandbox.
func (u *unit) bury() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.gone = true
}

func (u *unit) buried() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.gone
}

// setWatch replaces what ends the unit's watchers, ending the former.
func (u *unit) setWatch(stop context.CancelFunc) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.unwatch != nil {
		u.unwatch()
	}
	u.unwatch = stop
}

// setStore replaces what ends the plan to move the unit's memory to disk, ending the former.
func (u *unit) setStore(stop context.CancelFunc) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.unstore != nil {
		u.unstore()
	}
	u.unstore = stop
}
