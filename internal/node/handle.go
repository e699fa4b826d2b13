package node

import (
	"context"
	"fmt"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/keyedlock"
)

// sandboxHandle is one sandbox on the node.
type sandboxHandle struct {
	ref sandbox.Ref
	id  sandbox.ID

	// locks has the turn of each sandbox, by UID.
	locks *keyedlock.Lock

	mu      sync.Mutex
	row     *journal.Row       // +checklocks:mu
	seen    sandbox.Observed   // +checklocks:mu
	gone    bool               // +checklocks:mu
	claimed bool               // +checklocks:mu
	disk    diskUse            // +checklocks:mu
	unwatch context.CancelFunc // +checklocks:mu
	unstore context.CancelFunc // +checklocks:mu
	// retrying is set while Run tries again and again to remove the unit.
	retrying bool // +checklocks:mu
}

func newSandboxHandle(ref sandbox.Ref, seen sandbox.Observed, locks *keyedlock.Lock) *sandboxHandle {
	return &sandboxHandle{ref: ref, id: sandbox.IDOf(ref.UID), locks: locks, seen: seen}
}

// take waits for the unit's turn. The context that it returns ends when the sandbox is to be removed;
// done gives the turn back.
func (u *sandboxHandle) take(ctx context.Context) (_ context.Context, done func(), err error) {
	return u.acquire(ctx, false)
}

// takeToRemove waits for the unit's turn, and interrupts all that hold it or wait for it before.
func (u *sandboxHandle) takeToRemove(ctx context.Context) (_ context.Context, done func(), err error) {
	return u.acquire(ctx, true)
}

func (u *sandboxHandle) acquire(ctx context.Context, interrupts bool) (_ context.Context, done func(), err error) {
	ctx, done, err = u.locks.Acquire(ctx, u.ref.UID, interrupts)
	if err != nil {
		return nil, nil, fmt.Errorf("wait for sandbox %s/%s: %w: %w", u.ref.Namespace, u.ref.Name, err, errs.ErrUnavailable)
	}
	return ctx, done, nil
}

// busy reports whether the sandbox's turn is taken.
func (u *sandboxHandle) busy() bool {
	held, _ := u.locks.Holder(u.ref.UID)
	return held
}

func (u *sandboxHandle) observed() sandbox.Observed {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.seen
}

// see changes what is observed and reports whether that is a change.
func (u *sandboxHandle) see(change func(*sandbox.Observed)) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	before := u.seen
	change(&u.seen)
	return before != u.seen
}

func (u *sandboxHandle) diskUse() diskUse {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.disk
}

func (u *sandboxHandle) setDiskUse(d diskUse) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.disk = d
}

// current is the unit's row of the journal; nil where nothing was begun.
func (u *sandboxHandle) current() *journal.Row {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.row
}

func (u *sandboxHandle) setRow(r *journal.Row) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.row = r
}

// claim notes that somebody asks for the sandbox, so that it is no orphan.
func (u *sandboxHandle) setDesired() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.claimed = true
}

// removeOrphans takes claim back: whoever asked for the sandbox may not know it any more.
func (u *sandboxHandle) clearDesired() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.claimed = false
}

// retries notes whether the unit's removal is tried again by itself, and reports whether that is
// a change.
func (u *sandboxHandle) retries(on bool) (changed bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	changed = u.retrying != on
	u.retrying = on
	return changed
}

func (u *sandboxHandle) isDesired() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.claimed
}

// bury marks a unit that is no longer the one of its sandbox.
func (u *sandboxHandle) markRemoved() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.gone = true
}

func (u *sandboxHandle) isRemoved() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.gone
}

// setWatch replaces what ends the unit's watchers, ending the former.
func (u *sandboxHandle) setWatch(stop context.CancelFunc) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.unwatch != nil {
		u.unwatch()
	}
	u.unwatch = stop
}

// setStore replaces what ends the plan to move the unit's memory to disk, ending the former.
func (u *sandboxHandle) setStore(stop context.CancelFunc) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.unstore != nil {
		u.unstore()
	}
	u.unstore = stop
}
