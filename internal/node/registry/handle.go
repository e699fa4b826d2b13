package registry

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// Handle is the lock, the row and the status of one sandbox on the node.
type Handle struct {
	Ref sandbox.Ref
	ID  sandbox.ID

	registry *Registry // has its lock

	Mu      sync.Mutex
	row     *journal.Row       // +checklocks:Mu
	seen    sandbox.Observed   // +checklocks:Mu
	removed bool               // +checklocks:Mu
	desired bool               // +checklocks:Mu
	disk    DiskUse            // +checklocks:Mu
	unwatch context.CancelFunc // +checklocks:Mu
	Unstore context.CancelFunc // +checklocks:Mu
	// retrying is set while a task retries the removal.
	retrying bool // +checklocks:Mu
}

// Acquire waits for the lock of the sandbox. A removal cancels the returned context; release unlocks.
func (u *Handle) Acquire(ctx context.Context) (_ context.Context, release func(), err error) {
	return u.wait(ctx, false)
}

// AcquireToRemove waits for the lock, and interrupts its holder and the callers before.
func (u *Handle) AcquireToRemove(ctx context.Context) (_ context.Context, release func(), err error) {
	return u.wait(ctx, true)
}

func (u *Handle) wait(ctx context.Context, interrupts bool) (_ context.Context, release func(), err error) {
	ctx, release, err = u.registry.locks.Acquire(ctx, u.Ref.UID, interrupts)
	if err != nil {
		return nil, nil, fmt.Errorf("wait for sandbox %s/%s: %w: %w", u.Ref.Namespace, u.Ref.Name, err, errs.ErrUnavailable)
	}
	return ctx, release, nil
}

// Holder reports whether the lock of the sandbox is held, and whether its holder was interrupted.
func (u *Handle) Holder() (held, interrupted bool) { return u.registry.locks.Holder(u.Ref.UID) }

// UnlessInterrupted derives from the lock holder's context one that only an interruption cancels.
func (u *Handle) UnlessInterrupted(held context.Context) (context.Context, context.CancelFunc) {
	return u.registry.locks.UnlessInterrupted(held, u.Ref.UID)
}

// Observed returns the status that controllers see.
func (u *Handle) Observed() sandbox.Observed {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	return u.seen
}

// Update changes the status and reports whether it differs.
func (u *Handle) Update(change func(*sandbox.Observed)) bool {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	before := u.seen
	change(&u.seen)
	return before != u.seen
}

// Finished shows an operation that has succeeded.
func (u *Handle) Finished(op agents.OperationStatus) {
	u.Update(func(o *sandbox.Observed) {
		var all sandbox.Operations
		if o.Operations != nil {
			all = *o.Operations
		}
		o.Operations = new(all.With(op))
	})
}

// DiskUse returns the last measured use of disk.
func (u *Handle) DiskUse() DiskUse {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	return u.disk
}

// SetDiskUse records a measured use of disk.
func (u *Handle) SetDiskUse(d DiskUse) {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	u.disk = d
}

// Row is the sandbox's row of the journal; nil if it has none. It is replaced, never changed.
func (u *Handle) Row() *journal.Row {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	return u.row
}

// SetRow replaces the row in memory. The caller holds the sandbox's lock.
func (u *Handle) SetRow(r *journal.Row) {
	u.Mu.Lock()
	before := u.row
	u.row = r
	u.Mu.Unlock()
	if from, to := addressOf(before), addressOf(r); from != to {
		u.registry.moved(u, from, to)
	}
}

func addressOf(r *journal.Row) netip.Addr {
	if r == nil {
		return netip.Addr{}
	}
	return r.Address
}

// SetDesired records that a caller needs the sandbox, so that it is no orphan.
func (u *Handle) SetDesired() {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	u.desired = true
}

// clearDesired revokes SetDesired: the orphan scan checks whether the sandbox exists.
func (u *Handle) clearDesired() {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	u.desired = false
}

// SetRetrying records whether a task retries the removal, and reports whether that is a change.
func (u *Handle) SetRetrying(on bool) (changed bool) {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	changed = u.retrying != on
	u.retrying = on
	return changed
}

// IsDesired reports whether an object requires the sandbox.
func (u *Handle) IsDesired() bool {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	return u.desired
}

// MarkRemoved marks a handle that the registry no longer has.
func (u *Handle) MarkRemoved() {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	u.removed = true
}

// IsRemoved reports whether the sandbox has been removed from the host.
func (u *Handle) IsRemoved() bool {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	return u.removed
}

// SetWatch replaces the cancel function of the sandbox's watchers, and calls the former.
func (u *Handle) SetWatch(stop context.CancelFunc) {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	if u.unwatch != nil {
		u.unwatch()
	}
	u.unwatch = stop
}

// SetStore replaces the cancel function of the plan to move memory to disk, and calls the former.
func (u *Handle) SetStore(stop context.CancelFunc) {
	u.Mu.Lock()
	defer u.Mu.Unlock()
	if u.Unstore != nil {
		u.Unstore()
	}
	u.Unstore = stop
}

// DiskUse is a measured use of disk.
type DiskUse struct {
	Bytes int64
	Until time.Time
}
