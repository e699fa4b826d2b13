package node

import (
	"context"
	"fmt"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Suspend pauses a sandbox with what the mode keeps; empty means agents.SuspendMemory:
//
//	Memory  its processes are frozen with their memory, which is moved to disk after Config.StoreAfter. A
//	        sandbox of class runc keeps its files only
//	Files   its processes end; its files, volumes and identity stay
//	Delete  only its volume claims stay, and it is observed as absent
//
// A paused sandbox stays as it is, whatever it keeps. After an error it runs, or, once the journal has the decision, it is
// paused and the removal of its container is retried.
func (n *Node) Suspend(ctx context.Context, ref sandbox.Ref, mode agents.SuspendMode) (sandbox.Observed, error) {
	switch mode {
	case "", agents.SuspendMemory, agents.SuspendFiles, agents.SuspendDelete:
	default:
		return sandbox.Observed{}, fmt.Errorf("spec.barchan.suspend: %q is none of %s, %s, %s: %w",
			mode, agents.SuspendMemory, agents.SuspendFiles, agents.SuspendDelete, errs.ErrInvalid)
	}
	return n.locked(ctx, ref, "node suspend", func(ctx context.Context, u *registry.Handle, r *journal.Row) error {
		return n.suspender.Suspend(ctx, u, r, mode)
	})
}

// Resume continues a paused sandbox, wherever its memory is, and waits while that is moved. Without memory it starts the
// sandbox from what it keeps. A running sandbox stays as it is.
//
// From disk the sandbox has its processes with their IDs, memory, files, listening sockets and its address, unless that was
// released; outside connections have ended. An errs.ErrConflict says why its memory cannot be used: it needs the runtime's
// build and the processor features that it was written with, and must be undamaged. After an error the sandbox is paused as
// before.
//
// With filesOnly the memory is discarded permanently, and the sandbox started from its files.
func (n *Node) Resume(ctx context.Context, ref sandbox.Ref, filesOnly bool) (sandbox.Observed, error) {
	return n.locked(ctx, ref, "node resume", func(ctx context.Context, u *registry.Handle, r *journal.Row) error {
		return n.suspender.Resume(ctx, u, r, filesOnly)
	})
}

// locked does work on a running or paused sandbox with its lock held, in a span of a name.
func (n *Node) locked(ctx context.Context, ref sandbox.Ref, span string, do func(ctx context.Context, u *registry.Handle, r *journal.Row) error) (_ sandbox.Observed, err error) {
	ctx, end := telemetry.StartSpan(ctx, span, telemetry.OfSandbox(string(sandbox.IDOf(ref.UID))))
	defer func() { end(err) }()
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Observed{}, err
	}
	u := n.handles.Lookup(ref.UID)
	if u == nil {
		return n.absent(), fmt.Errorf("sandbox %s/%s is not on this node: %w", ref.Namespace, ref.Name, errs.ErrConflict)
	}
	u.SetDesired()
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return u.Observed(), err
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || u.Observed().State == sandbox.ContainerExited {
		return u.Observed(), fmt.Errorf("sandbox %s/%s is %s: %w", ref.Namespace, ref.Name, u.Observed().State, errs.ErrConflict)
	}
	if err := do(ctx, u, r); err != nil {
		return u.Observed(), fmt.Errorf("sandbox %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return u.Observed(), nil
}

// recreate creates a sandbox of which only the volume claims are left, from its object as it is now. The caller holds its
// lock.
func (n *Node) recreate(ctx context.Context, u *registry.Handle, r *journal.Row, s *agents.Sandbox) (sandbox.Observed, error) {
	if s.Spec.Barchan != nil { // the checkpoint of its first start may be gone
		s = s.DeepCopy()
		s.Spec.Barchan.Restore = nil
	}
	p, err := n.planOf(s)
	if err == nil {
		err = n.suspender.Recreate(ctx, u, r, p)
	}
	return u.Observed(), err
}
