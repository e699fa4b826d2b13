package suspend

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

// wake restores a sandbox from what it keeps on disk. After a failure it is paused as before, and may be resumed again. With
// filesOnly its memory is discarded first, permanently.
//
// Files that its processes wrote before a failure stay written, and the memory does not match them. So wake does not end
// with its request; only the removal of the sandbox interrupts it.
func (p *Suspender) wake(ctx context.Context, u *registry.Handle, r *journal.Row, filesOnly bool) error {
	if err := p.cfg.Refuse(); err != nil {
		return err
	}
	began := time.Now()
	ctx, done := u.UnlessInterrupted(ctx)
	defer done()
	w := p.cfg.Host.Operation(new(*r))
	if err := p.selectRestoreSource(ctx, w, u, filesOnly); err != nil {
		return err
	}
	err := p.note(w, u, w.Row, journal.Waking)
	if err == nil {
		err = w.BringUp(ctx)
	}
	awake := *w.Row
	awake.Memory, awake.Kept, awake.PausedAt, awake.Ready = nil, "", time.Time{}, false
	if err == nil {
		err = p.note(w, u, &awake, journal.Live)
	}
	if err == nil {
		err = w.After("running")
	}
	switch {
	case errors.Is(err, operation.ErrCrash):
		return err
	case err != nil:
		return p.rollBackResume(ctx, u, w, err)
	}
	p.cfg.SetRunning(u, &awake)
	u.Finished(w.Status(agents.OperationResume))
	if w.Row.KeepsMemory() {
		p.forgetMemory(u)
	}
	p.cfg.ObserveStep(string(awake.Plan.Class), "wake", time.Since(began))
	p.cfg.Log.InfoContext(ctx, "sandbox resumed from disk", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		"memory", w.Row.KeepsMemory(), telemetry.Address, awake.Address, telemetry.Duration, time.Since(began))
	return nil
}

// selectRestoreSource chooses what a sandbox is restored from, and removes the rest.
func (p *Suspender) selectRestoreSource(ctx context.Context, w *operation.Operation, u *registry.Handle, filesOnly bool) error {
	if filesOnly && w.Row.KeepsMemory() {
		if err := p.decide(w, u, agents.SuspendFiles); err != nil {
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
	if w.Row.Stage != journal.Stored { // parts of a container may be left
		return p.Release(ctx, w, u)
	}
	return nil
}

// forgetMemory removes the memory image of a resumed sandbox in the background. After a crash, the next checkpoint, the
// removal of the sandbox or the next start removes it.
func (p *Suspender) forgetMemory(u *registry.Handle) {
	p.cfg.Later(func(ctx context.Context) {
		ctx, done, err := u.Acquire(ctx)
		if err != nil {
			return
		}
		defer done()
		if r := u.Row(); u.IsRemoved() || r == nil || r.OnDisk() {
			return // removed, or paused again
		}
		if err := memimage.Remove(p.cfg.Host.MemoryDir(string(u.ID))); err != nil {
			p.cfg.Log.WarnContext(ctx, "memory image of a resumed sandbox not removed", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		}
		failpoint.Reach("node/forgotten")
	})
}

// rollBackResume undoes a failed wake.
func (p *Suspender) rollBackResume(ctx context.Context, u *registry.Handle, w *operation.Operation, cause error) error {
	if ctx.Err() != nil {
		cause = fmt.Errorf("%w: %w", cause, errs.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	failures := []error{fmt.Errorf("resume from disk: %w", errs.Retryable(cause))}
	if u.Row().Stage == journal.Live { // the failure followed the last write
		failures = append(failures, p.cfg.Registry.Note(u, w.Row, journal.Storing))
	}
	return errors.Join(append(failures, p.Release(ctx, w, u))...)
}

// TakeOver adopts a sandbox on disk, and completes its suspend. It takes the lock.
func (p *Suspender) TakeOver(ctx context.Context, u *registry.Handle, r *journal.Row) {
	p.setStored(u, r)
	if !p.AtRest(r) {
		p.Finish(ctx, u)
	}
}

// AtRest reports whether nothing is left to do for a sandbox on disk.
func (p *Suspender) AtRest(r *journal.Row) bool {
	_, leased := p.cfg.Allocator.Of(string(r.Plan.Ref.UID))
	return r.Stage == journal.Stored && leased == r.Address.IsValid() && (!leased || !p.cfg.ReleaseAddresses)
}

// Finish removes what an interruption left of the container of a sandbox on disk. It takes the lock. It returns no error,
// because the sweep and the next Resume try again.
func (p *Suspender) Finish(ctx context.Context, u *registry.Handle) {
	if r := u.Row(); r != nil && p.AtRest(r) {
		return
	}
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || !r.OnDisk() || p.AtRest(r) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	w := p.cfg.Host.Operation(new(*r))
	if err := p.Release(ctx, w, u); err != nil {
		p.cfg.Log.WarnContext(ctx, "container of a sandbox on disk not removed", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}
