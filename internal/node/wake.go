package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// wake brings a sandbox back from what it keeps on disk, in its turn. After a failure it sleeps
// as before, and the next try may succeed. With filesOnly its memory is given up first, wherever
// that is; there is no way back from there.
//
// What its processes wrote to files between the start of a try and its failure stays written,
// and their memory knows nothing of it. So a try goes on if the one who asked for it does not
// wait any more; only the removal of the sandbox interrupts it.
func (n *Node) wake(ctx context.Context, u *registry.Handle, r *journal.Row, filesOnly bool) error {
	if err := n.refused(); err != nil {
		return err
	}
	began := time.Now()
	ctx, done := u.UnlessInterrupted(ctx)
	defer done()
	w := n.host.Operation(new(*r))
	if err := n.selectRestoreSource(ctx, w, u, filesOnly); err != nil {
		return err
	}
	err := n.handles.Note(u, w.Row, journal.Waking)
	if err == nil {
		err = w.BringUp(ctx)
	}
	awake := *w.Row
	awake.Memory, awake.Kept, awake.PausedAt, awake.Ready = nil, "", time.Time{}, false
	if err == nil {
		err = n.handles.Note(u, &awake, journal.Live)
	}
	if err == nil {
		err = w.After("awake")
	}
	switch {
	case errors.Is(err, operation.ErrCrash):
		return err
	case err != nil:
		return n.rollBackResume(ctx, u, w, err)
	}
	n.setRunning(u, &awake)
	if w.Row.KeepsMemory() {
		n.forgetMemory(u)
	}
	n.observeStep(awake.Plan.Class, "wake", time.Since(began))
	n.log.InfoContext(ctx, "sandbox resumed from disk", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		"memory", w.Row.KeepsMemory(), telemetry.Address, awake.Address, telemetry.Duration, time.Since(began))
	return nil
}

// selectRestoreSource decides what a sandbox comes back from, and sees to it that nothing else of it is
// left.
func (n *Node) selectRestoreSource(ctx context.Context, w *operation.Operation, u *registry.Handle, filesOnly bool) error {
	if filesOnly && w.Row.KeepsMemory() {
		if err := n.decide(w, u, agents.SuspendFiles); err != nil {
			return err
		}
		if err := w.After("decided"); err != nil {
			return err
		}
	}
	if w.Row.KeepsMemory() {
		if err := w.CheckMemory(ctx); err != nil {
			return err
		}
	}
	if w.Row.Stage != journal.Stored { // something of a container may be there
		return n.releaseResources(ctx, w, u)
	}
	return nil
}

// forgetMemory has Run remove the image of a sandbox that was resumed from it, for which nobody
// has to wait. If that is not done, the next checkpoint, the removal or the next start does it.
func (n *Node) forgetMemory(u *registry.Handle) {
	n.tasks.Start(func(ctx context.Context) {
		ctx, done, err := u.Acquire(ctx)
		if err != nil {
			return
		}
		defer done()
		if r := u.Row(); u.IsRemoved() || r == nil || r.OnDisk() {
			return // removed, or asleep again
		}
		if err := memimage.Remove(n.host.MemoryDir(string(u.ID))); err != nil {
			n.log.WarnContext(ctx, "memory of a sandbox that was resumed is left on disk", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		}
		failpoint.Reach("node/forgotten")
	})
}

// rollBackResume takes back what a failed try to wake a sandbox has done.
func (n *Node) rollBackResume(ctx context.Context, u *registry.Handle, w *operation.Operation, cause error) error {
	if ctx.Err() != nil {
		cause = fmt.Errorf("%w: %w", cause, errs.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	failures := []error{fmt.Errorf("resume from disk: %w", errs.Retryable(cause))}
	if u.Row().Stage == journal.Live { // the failure followed the last write
		failures = append(failures, n.handles.Note(u, w.Row, journal.Storing))
	}
	return errors.Join(append(failures, n.releaseResources(ctx, w, u))...)
}

// takeOverStored makes a sandbox of the journal that sleeps on disk this node's own. One at rest is
// not touched.
func (n *Node) takeOverStored(ctx context.Context, u *registry.Handle, r *journal.Row) {
	n.setStored(u, r)
	if !n.atRest(r) {
		n.finishSuspend(ctx, u)
	}
}

// atRest reports whether nothing is left to be done for a sandbox that sleeps on disk.
func (n *Node) atRest(r *journal.Row) bool {
	_, leased := n.allocator.Of(string(r.Plan.Ref.UID))
	return r.Stage == journal.Stored && leased == r.Address.IsValid() && (!leased || !n.cfg.ReleaseAddresses)
}

// finishSuspend removes what an interruption left of the container of a sandbox whose memory is on
// disk. Failing is no reason for anything else to fail: the sweep and the next Resume try again.
func (n *Node) finishSuspend(ctx context.Context, u *registry.Handle) {
	if r := u.Row(); r != nil && n.atRest(r) {
		return
	}
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || !r.OnDisk() || n.atRest(r) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	w := n.host.Operation(new(*r))
	if err := n.releaseResources(ctx, w, u); err != nil {
		n.log.WarnContext(ctx, "rest of a sandbox whose memory is on disk is left on the machine", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}
