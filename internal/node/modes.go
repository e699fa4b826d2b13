package node

import (
	"context"
	"fmt"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// What a sandbox that keeps no memory goes through:
//
//	live ──────────→ storing → stored → waking → live
//	paused, stored ──↗ its memory is given up
//
// The journal decides: until it says storing, the processes are the sandbox; from then on its files
// are, or its volume claims, and all else is litter. The failure of a wake leads back to stored.

// suspendToFiles ends the processes of a sandbox that runs, and keeps its files or its claims.
func (n *Node) suspendToFiles(ctx context.Context, u *registry.Handle, r *journal.Row, mode agents.SuspendMode) error {
	began := time.Now()
	w := n.host.Operation(new(*r))
	if err := w.SaveFiles(ctx); err != nil {
		return err
	}
	w.Row.PausedAt = time.Now()
	if err := n.decide(w, u, mode); err != nil {
		return err
	}
	if err := w.After("decided"); err != nil {
		return err
	}
	n.observeStep(r.Plan.Class, "decide", time.Since(began))
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err := n.releaseResources(whole, w, u)
	n.dirty.Mark(u.Ref) // whoever watches learns of it although it was asked for: a failure is made good later
	if err != nil {
		return err
	}
	n.log.InfoContext(ctx, "sandbox suspended without its memory", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		"keeps", mode, telemetry.Duration, time.Since(began))
	return nil
}

// decide notes that from now on a sandbox is what the mode keeps. Its processes and memory, wherever
// they are, are litter from then on.
func (n *Node) decide(w *operation.Operation, u *registry.Handle, mode agents.SuspendMode) error {
	changed := *w.Row
	changed.Kept, changed.Memory, changed.Ready = mode, nil, false
	changed.Process = lifecycle.Process{} // whoever watches it must not take what follows for its end
	if err := n.handles.Note(u, &changed, journal.Storing); err != nil {
		return err
	}
	u.SetWatch(nil)
	u.SetStore(nil)
	*w.Row = changed
	n.setStored(u, w.Row)
	return nil
}

// setStored makes a sandbox seen that sleeps on disk.
func (n *Node) setStored(u *registry.Handle, r *journal.Row) {
	u.Update(func(o *sandbox.Observed) {
		if r.KeepsClaims() {
			*o = n.absent()
		} else {
			o.State, o.Address = sandbox.ContainerPaused, r.Address
		}
		o.Memory, o.Message = r.Place(), whereOf(r)
		if r.Memory != nil {
			o.EntrypointExit = r.Memory.Exit
		}
	})
}

// recreate makes a sandbox of which only the volume claims are left as its object is now, in the
// unit's turn.
func (n *Node) recreate(ctx context.Context, u *registry.Handle, r *journal.Row, s *agents.Sandbox) (sandbox.Observed, error) {
	if s.Spec.Barchan != nil { // what it was made from the first time may be gone
		s = s.DeepCopy()
		s.Spec.Barchan.Restore = nil
	}
	p, err := n.planOf(s)
	if err != nil {
		return u.Observed(), err
	}
	changed := *r
	changed.Plan = p
	if err := n.wake(ctx, u, &changed, false); err != nil {
		return u.Observed(), fmt.Errorf("create sandbox %s/%s again: %w", p.Ref.Namespace, p.Ref.Name, err)
	}
	return u.Observed(), nil
}
