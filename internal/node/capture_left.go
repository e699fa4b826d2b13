package node

import (
	"context"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// uncaptured makes a sandbox live again that was being captured when a node before this one ended. It is
// only of the unit: the journal follows once the sandbox is known to go on.
func (n *Node) uncaptured(u *registry.Handle, r *journal.Row) *journal.Row {
	if r.Stage != journal.Capturing {
		return r
	}
	r = new(*r)
	r.Stage = journal.Live
	u.SetRow(r)
	return r
}

// thawLeft lets a sandbox go on that a node before this one held still for a checkpoint.
func (n *Node) thawLeft(ctx context.Context, u *registry.Handle, r *journal.Row) *journal.Row {
	r = n.uncaptured(u, r)
	n.goesOn(ctx, u, r, false)
	return r
}

// goesOn sees to it that a live sandbox goes on after it was held still for a checkpoint, and that the
// journal says so. What cannot be done now is tried until it can.
func (n *Node) goesOn(ctx context.Context, u *registry.Handle, r *journal.Row, runs bool) {
	if runs && n.handles.Write(r, journal.Live) == nil {
		return
	}
	if n.thawNow(ctx, u, r) {
		return
	}
	n.tasks.Start(func(ctx context.Context) {
		for pause := firstRemovePause; lifecycle.Sleep(ctx, pause); pause = min(2*pause, longRemovePause) {
			if n.thawLater(ctx, u) {
				return
			}
		}
	})
}

// thawLater does as thawNow, in the sandbox's turn.
func (n *Node) thawLater(ctx context.Context, u *registry.Handle) (finished bool) {
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return true
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || r.Stage != journal.Live {
		return true
	}
	return n.thawNow(ctx, u, r)
}

// thawNow lets a live sandbox go on that may stand still, and notes that it is live.
func (n *Node) thawNow(ctx context.Context, u *registry.Handle, r *journal.Row) (finished bool) {
	began := time.Now()
	runtime, err := n.runtimes.Driving(r.Plan.Class, r.Build)
	if err == nil {
		err = thaw(ctx, runtime, string(u.ID))
	}
	if err == nil {
		err = n.handles.Write(r, journal.Live)
	}
	if err != nil {
		n.log.WarnContext(ctx, "sandbox may stand still for a checkpoint that was interrupted", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return false
	}
	n.log.DebugContext(ctx, "sandbox goes on that was being captured", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		telemetry.Duration, time.Since(began))
	return true
}
