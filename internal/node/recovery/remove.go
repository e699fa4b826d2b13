package recovery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// UndoTimeout bounds the undo of a failed operation, after its request has ended.
const UndoTimeout = time.Minute

// Clear undoes all steps of a sandbox, and then removes its row. After a failure its row and address stay, and Run retries.
func (rc *Recovery) Clear(ctx context.Context, u *registry.Handle, r *journal.Row) (err error) {
	defer func() {
		if err != nil && u.Row() != nil {
			rc.removeLater(u)
		}
	}()
	u.SetWatch(nil)
	u.SetStore(nil)
	r = new(*r) // readers share the handle's row
	if r.Stage != journal.Removing {
		if err := rc.cfg.Registry.Note(u, r, journal.Removing); err != nil {
			return err
		}
	}
	if err := rc.cfg.Host.Operation(r).Undo(ctx); err != nil {
		return errs.Retryable(err)
	}
	if err := rc.cfg.Journal.Remove(u.Ref); err != nil {
		return errs.Retryable(err)
	}
	failpoint.Reach("row/gone")
	rc.cfg.Registry.ForgetUnread(u.Ref.UID)
	u.SetRow(nil)
	u.Update(func(o *sandbox.Observed) { *o = rc.cfg.Absent() })
	return nil
}

// Remove removes a sandbox from the host in any state, and interrupts its create. It returns nil only when nothing of it is
// left. It may be repeated.
func (rc *Recovery) Remove(ctx context.Context, ref sandbox.Ref) error {
	if rc.cfg.Registry.CheckRead(ref) == nil { // else it is removed by the names that derive from the UID
		if err := rc.Rediscover(ctx, ref.UID); err != nil {
			return err
		}
	}
	u := rc.cfg.Registry.Of(ref)
	u.SetDesired()
	taken, done, err := u.AcquireToRemove(ctx)
	if err != nil {
		return err
	}
	defer done()
	if u.IsRemoved() {
		return nil
	}
	r := u.Row()
	if r == nil { // not in the journal; its resources may exist
		r = &journal.Row{Stage: journal.Removing, Plan: plan.Plan{Ref: ref, ID: u.ID}}
	}
	if err := rc.cfg.Registry.AwaitUnblocked(taken, u.ID); err != nil {
		return err
	}
	began := time.Now()
	if err := rc.Clear(taken, u, r); err != nil {
		return fmt.Errorf("remove sandbox %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	u.MarkRemoved()
	rc.cfg.Registry.Drop(u)
	rc.cfg.Log.InfoContext(ctx, "sandbox removed", telemetry.Namespace, ref.Namespace, telemetry.Sandbox, ref.Name, telemetry.Duration, time.Since(began))
	return nil
}

// undoLeft undoes an interrupted create or removal. After a failure the row and the address stay, and Run retries.
func (rc *Recovery) undoLeft(ctx context.Context, u *registry.Handle) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || r.Stage.Begun() {
		return
	}
	limited, cancel := context.WithTimeout(taken, UndoTimeout)
	defer cancel()
	if err := rc.Clear(limited, u, r); err != nil {
		rc.cfg.Log.WarnContext(ctx, "sandbox not removed yet", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return
	}
	u.MarkRemoved()
	rc.cfg.Registry.Drop(u)
}

// removeLater retries a failed removal in the background, without end. The row and the address of the sandbox stay until it
// succeeds.
func (rc *Recovery) removeLater(u *registry.Handle) {
	if !u.SetRetrying(true) {
		return
	}
	rc.cfg.Later(func(ctx context.Context) {
		defer u.SetRetrying(false)
		for pause := minRemovePause; lifecycle.Sleep(ctx, pause); pause = min(2*pause, maxRemovePause) {
			rc.undoLeft(ctx, u)
			if r := u.Row(); u.IsRemoved() || r == nil || r.Stage.Begun() {
				rc.cfg.Changes.Mark(u.Ref)
				return
			}
		}
	})
}

// clearLeftovers removes resources without a row of the journal.
func (rc *Recovery) clearLeftovers(ctx context.Context) error {
	v, err := rc.cfg.Inventory.Scan(ctx)
	failures := []error{err}
	for id := range v.Leftovers() {
		if id != "" {
			w := rc.cfg.Host.Operation(&journal.Row{Stage: journal.Removing, Plan: plan.Plan{ID: sandbox.ID(id)}})
			failures = append(failures, w.Undo(ctx))
		}
	}
	return errors.Join(failures...)
}

// Destroy removes all sandboxes, checkpoints and leftovers. Nothing else may run.
func (rc *Recovery) Destroy(ctx context.Context) error {
	var failures []error
	err := rc.cfg.Journal.Each(func(r *journal.Row) {
		u := rc.cfg.Registry.Of(r.Plan.Ref)
		u.SetRow(r)
	}, func(key, _ []byte, _ error) { // unreadable: its resources have names that derive from the UID
		ref := sandbox.Ref{UID: types.UID(key)}
		rc.cfg.Registry.Of(ref).SetRow(&journal.Row{Stage: journal.Removing, Plan: plan.Plan{Ref: ref, ID: sandbox.IDOf(ref.UID)}})
	})
	failures = append(failures, err)
	for _, u := range rc.cfg.Registry.All() {
		if r := u.Row(); r != nil {
			failures = append(failures, rc.Clear(ctx, u, r))
		}
	}
	failures = append(failures, rc.clearLeftovers(ctx), rc.cfg.Checkpoints.Destroy(ctx))
	records, err := rc.cfg.Containerd.Records(ctx)
	if err == nil {
		err = rc.removeOrphanSnapshots(ctx, records)
	}
	return errors.Join(append(failures, err)...)
}
