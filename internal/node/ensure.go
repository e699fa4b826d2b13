package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/recovery"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Ensure creates the sandbox and returns when its agent answers. One with init containers is pending meanwhile, and
// Ensure returns at once. A running, paused or ended sandbox stays as it is. One of
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
	if n.initializes(s) {
		return n.ensureInitialized(ctx, s, ref)
	}
	return n.ensureLocked(ctx, s, ref)
}

// ensureLocked does the work of Ensure with the lock of the sandbox held.
func (n *Node) ensureLocked(ctx context.Context, s *agents.Sandbox, ref sandbox.Ref) (sandbox.Observed, error) {
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
	return n.recovery.Rediscover(ctx, ref.UID)
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
func (n *Node) ensure(ctx context.Context, u *registry.Handle, s *agents.Sandbox) (_ sandbox.Observed, err error) {
	ctx, end := telemetry.StartSpan(ctx, "node create", telemetry.OfSandbox(string(u.ID)))
	defer func() { end(err) }()
	if r := u.Row(); r != nil {
		if r.KeepsClaims() {
			return n.recreate(ctx, u, r, s)
		}
		if r.Stage != journal.Making && r.Stage != journal.Removing {
			return u.Observed(), nil
		}
		// The undo of an earlier attempt failed.
		if err := n.recovery.Clear(ctx, u, r); err != nil {
			return u.Observed(), err
		}
	}
	if err := n.cfg.Refuse(); err != nil {
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
	w := n.host.Operation(&journal.Row{Stage: journal.Making, Plan: p})
	w.Began(began)
	w.Origin, w.Initializing = from, n.initializing(p.Ref)
	w.Pulling = func() func(ctrd.Progress) { return n.pullReports(p.Ref) }
	if err := n.findImage(ctx, w); err != nil {
		return u.Observed(), err
	}
	n.observeStep(p.Class, "image", time.Since(began))
	w.Record("image", began)
	if w.Row.Disk, err = n.diskOf(&p); err != nil {
		return u.Observed(), err
	}
	if err := w.Resolve(ctx); err != nil { // before anything changes: it may be missing for long
		return u.Observed(), fmt.Errorf("create sandbox %s/%s: %w", p.Ref.Namespace, p.Ref.Name, err)
	}
	if err := n.create(ctx, u, w); err != nil {
		return u.Observed(), fmt.Errorf("create sandbox %s/%s: %w", p.Ref.Namespace, p.Ref.Name, err)
	}
	n.observeStep(p.Class, "total", time.Since(began))
	n.log.InfoContext(ctx, "sandbox runs", telemetry.Namespace, p.Ref.Namespace, telemetry.Sandbox, p.Ref.Name,
		"id", p.ID, telemetry.Address, w.Row.Address, "class", p.Class, telemetry.Duration, time.Since(began))
	return u.Observed(), nil
}

// diskOf is the size of the disk of a new sandbox; zero where the machine can have none, and no limit is asked for.
func (n *Node) diskOf(p *plan.Plan) (int64, error) {
	err := n.disks.Fault()
	if n.cfg.Unbounded || err != nil && p.Disk == 0 {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("spec.podTemplate.spec.containers[0].resources.limits[ephemeral-storage]: this node cannot bound disks: %s: %w", errs.Text(err), errs.ErrInvalid)
	}
	return cmp.Or(p.Disk, n.cfg.DefaultDisk), nil
}

// create does all steps, or undoes those that were done.
func (n *Node) create(ctx context.Context, u *registry.Handle, w *operation.Operation) error {
	note := func(stage journal.Stage) error {
		return w.Timed("journal", func() error { return n.handles.Note(u, w.Row, stage) })
	}
	err := note(journal.Making)
	if err == nil {
		err = w.Create(ctx)
	}
	if err == nil {
		err = note(journal.Live)
	}
	if err == nil {
		n.supervisor.SetRunning(u, w.Row)
		u.Finished(w.Status(startOf(w)))
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
	undoCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recovery.UndoTimeout)
	defer cancel()
	return errors.Join(err, n.recovery.Clear(undoCtx, u, w.Row))
}

// startOf is the type of the operation that starts a new sandbox.
func startOf(w *operation.Operation) agents.OperationType {
	if w.Origin != nil {
		return agents.OperationRestore
	}
	return agents.OperationCreate
}

// imageUsers returns the sandboxes that need the image of a digest; ended ones do not.
func (n *Node) imageUsers(digest string) (refs []sandbox.Ref) {
	for _, u := range n.handles.All() {
		if r := u.Row(); r != nil && r.Uses(digest) && r.Stage != journal.Ended {
			refs = append(refs, u.Ref)
		}
	}
	return refs
}
