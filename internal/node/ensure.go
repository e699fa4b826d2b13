package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// undoTimeout bounds the undo of a failed operation, after its request has ended.
const undoTimeout = time.Minute

// Ensure creates the sandbox and returns when its agent answers. A running, paused or ended sandbox stays as it is. One of
// which only the volume claims were kept is created again from them and the object. Calls for one sandbox are serialized.
//
// Kinds of error: errs.ErrInvalid and errs.ErrNotFound, only the user can correct it (an unsupported field, an unknown image);
// errs.ErrExhausted, the host has no resources left; errs.ErrUnavailable, a retry may succeed.
func (n *Node) Ensure(ctx context.Context, s *agents.Sandbox) (sandbox.Observed, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Observed{}, err
	}
	ref := sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID}
	if err := n.find(ctx, ref); err != nil {
		return n.absent(), err
	}
	n.handles.ClearDesiredByName(ref)
	for {
		u := n.handles.Of(ref)
		u.SetDesired()
		taken, done, err := u.Acquire(ctx)
		if err != nil {
			return u.Observed(), err
		}
		if u.IsRemoved() { // removed meanwhile; start with a new handle
			done()
			continue
		}
		seen, err := n.ensure(taken, u, s)
		if u.Row() == nil {
			u.MarkRemoved()
			n.handles.Drop(u)
		}
		done()
		return seen, err
	}
}

// find loads a sandbox of the journal into the registry.
func (n *Node) find(ctx context.Context, ref sandbox.Ref) error {
	if err := n.handles.CheckRead(ref); err != nil {
		return err
	}
	return n.rediscover(ctx, ref.UID)
}

// checkUnused rejects a create while processes of the sandbox run that the journal has lost.
func (n *Node) checkUnused(id sandbox.ID) error {
	inside, err := cgroups.HasProcesses(n.host.Cgroup(string(id)))
	if err != nil {
		return errs.Retryable(err)
	}
	if inside {
		return fmt.Errorf("unknown processes of this sandbox run and are kept; delete the sandbox to end them: %w", errs.ErrUnavailable)
	}
	return nil
}

// ensure does the work of Ensure. The caller holds the lock of the sandbox.
func (n *Node) ensure(ctx context.Context, u *registry.Handle, s *agents.Sandbox) (sandbox.Observed, error) {
	if r := u.Row(); r != nil {
		if r.KeepsClaims() {
			return n.recreate(ctx, u, r, s)
		}
		if r.Stage != journal.Making && r.Stage != journal.Removing {
			return u.Observed(), nil
		}
		// The undo of an earlier attempt failed.
		if err := n.clear(ctx, u, r); err != nil {
			return u.Observed(), err
		}
	}
	if err := n.refused(); err != nil {
		return u.Observed(), err
	}
	if err := n.handles.AwaitUnblocked(ctx, u.ID); err != nil {
		return u.Observed(), err
	}
	if err := n.checkUnused(u.ID); err != nil {
		return u.Observed(), err
	}
	began := time.Now()
	p, err := n.planOf(s)
	if err != nil {
		return u.Observed(), err
	}
	from, err := n.originOf(ctx, s, &p)
	if err != nil {
		return u.Observed(), err
	}
	defer from.Close()
	image, err := n.imageFor(ctx, &p, from)
	if err != nil {
		return u.Observed(), err
	}
	n.observeStep(p.Class, "image", time.Since(began))
	w := n.host.Operation(&journal.Row{
		Stage: journal.Making, Plan: p, Digest: image.Digest, ImageEnv: append([]string{}, image.Config.Env...), ImageRun: operation.RunOf(image),
	})
	w.Image, w.Origin = image, from
	if err := n.create(ctx, u, w); err != nil {
		return u.Observed(), fmt.Errorf("create sandbox %s/%s: %w", p.Ref.Namespace, p.Ref.Name, err)
	}
	n.observeStep(p.Class, "total", time.Since(began))
	n.log.InfoContext(ctx, "sandbox runs", telemetry.Namespace, p.Ref.Namespace, telemetry.Sandbox, p.Ref.Name,
		"id", p.ID, telemetry.Address, w.Row.Address, "class", p.Class, telemetry.Duration, time.Since(began))
	return u.Observed(), nil
}

// create does all steps, or undoes those that were done.
func (n *Node) create(ctx context.Context, u *registry.Handle, w *operation.Operation) error {
	err := n.handles.Note(u, w.Row, journal.Making)
	if err == nil {
		err = w.Create(ctx)
	}
	if err == nil {
		err = n.handles.Note(u, w.Row, journal.Live)
	}
	if err == nil {
		n.supervisor.SetRunning(u, w.Row)
		if w.RestoresMemory() {
			u.Update(func(o *sandbox.Observed) { o.EntrypointExit = w.Origin.Exit })
		}
		return nil
	}
	if errors.Is(err, operation.ErrCrash) {
		return err
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", err, errs.ErrUnavailable)
	}
	undoCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return errors.Join(err, n.clear(undoCtx, u, w.Row))
}

// clear undoes all steps of a sandbox, and then removes its row. After a failure its row and address stay, and Run retries.
func (n *Node) clear(ctx context.Context, u *registry.Handle, r *journal.Row) (err error) {
	defer func() {
		if err != nil && u.Row() != nil {
			n.removeLater(u)
		}
	}()
	u.SetWatch(nil)
	u.SetStore(nil)
	r = new(*r) // readers share the handle's row
	if r.Stage != journal.Removing {
		if err := n.handles.Note(u, r, journal.Removing); err != nil {
			return err
		}
	}
	if err := n.host.Operation(r).Undo(ctx); err != nil {
		return errs.Retryable(err)
	}
	if err := n.journal.Remove(u.Ref); err != nil {
		return errs.Retryable(err)
	}
	failpoint.Reach("row/gone")
	n.handles.ForgetUnread(u.Ref.UID)
	u.SetRow(nil)
	u.Update(func(o *sandbox.Observed) { *o = n.absent() })
	return nil
}

// Remove removes a sandbox from the host in any state, and interrupts its create. It returns nil only when nothing of it is
// left. It may be repeated.
func (n *Node) Remove(ctx context.Context, ref sandbox.Ref) error {
	if err := n.awaitAdopted(ctx); err != nil {
		return err
	}
	if n.handles.CheckRead(ref) == nil { // else it is removed by the names that derive from the UID
		if err := n.rediscover(ctx, ref.UID); err != nil {
			return err
		}
	}
	u := n.handles.Of(ref)
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
	if err := n.handles.AwaitUnblocked(taken, u.ID); err != nil {
		return err
	}
	began := time.Now()
	if err := n.clear(taken, u, r); err != nil {
		return fmt.Errorf("remove sandbox %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	u.MarkRemoved()
	n.handles.Drop(u)
	n.log.InfoContext(ctx, "sandbox removed", telemetry.Namespace, ref.Namespace, telemetry.Sandbox, ref.Name, telemetry.Duration, time.Since(began))
	return nil
}

// imageUsers returns the sandboxes that need the image of a digest; ended ones do not.
func (n *Node) imageUsers(digest string) (refs []sandbox.Ref) {
	for _, u := range n.handles.All() {
		if r := u.Row(); r != nil && r.Digest == digest && r.Stage != journal.Ended {
			refs = append(refs, u.Ref)
		}
	}
	return refs
}
