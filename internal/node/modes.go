package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// What a sandbox that keeps no memory goes through:
//
//	live ──────────→ storing → stored → waking → live
//	paused, stored ──↗ its memory is given up
//
// The journal decides: until it says storing, the processes are the sandbox; from then on its files
// are, or its volume claims, and all else is litter. The failure of a wake leads back to stored.

// offersFiles is what is said where memory cannot be used.
const offersFiles = "resume it from its files only with spec.barchan.resume: Files, or memory=false in the API"

// syncTimeout bounds the wait for an agent to write what the sandbox's kernel has to its files.
const syncTimeout = 30 * time.Second

// suspendToFiles ends the processes of a sandbox that runs, and keeps its files or its claims.
func (n *Node) suspendToFiles(ctx context.Context, u *registry.Handle, r *journal.Row, mode agents.SuspendMode) error {
	began := time.Now()
	w := &operation{n: n, row: new(journal.Row)}
	*w.row = *r
	for _, s := range []step{{name: "sync", do: w.sync}, {name: "flush", do: w.flush}} {
		if err := w.doOne(ctx, s); err != nil {
			return err
		}
	}
	w.row.PausedAt = time.Now()
	if err := w.decide(u, mode); err != nil {
		return err
	}
	if err := w.after("decided"); err != nil {
		return err
	}
	n.observeStep(r.Plan.Class, "decide", time.Since(began))
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err := w.releaseResources(whole, u)
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
func (w *operation) decide(u *registry.Handle, mode agents.SuspendMode) error {
	changed := *w.row
	changed.Kept, changed.Memory, changed.Ready = mode, nil, false
	changed.Process = lifecycle.Process{} // whoever watches it must not take what follows for its end
	if err := w.n.handles.Note(u, &changed, journal.Storing); err != nil {
		return err
	}
	u.SetWatch(nil)
	u.SetStore(nil)
	*w.row = changed
	w.n.setStored(u, w.row)
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

// sync has the agent of a sandbox that runs write to its files what its kernel still has of them.
func (w *operation) sync(ctx context.Context) error {
	agent, err := w.n.agentOf(w.row.Plan.ID, w.row.Address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	if err := agent.Freeze(ctx); err != nil {
		return errs.Retryable(fmt.Errorf("have its agent write its files: %w", err))
	}
	return nil
}

// stop ends what runs of a sandbox that sleeps on disk. One whose memory was given up while it was
// frozen is let go on before, so that what its kernel had not written yet reaches its files; what
// of that fails is not what the sandbox waits for.
func (w *operation) stop(ctx context.Context) error {
	if w.row.Kept == agents.SuspendFiles && w.row.Address.IsValid() {
		if err := w.flushPaused(ctx); err != nil {
			w.n.log.WarnContext(ctx, "what a sandbox had not written to its files yet is lost", telemetry.Sandbox, w.row.Plan.Ref.Name, telemetry.Error, err)
		}
	}
	return w.kill(ctx)
}

// flushPaused has a frozen container write its files.
func (w *operation) flushPaused(ctx context.Context) error {
	runtime, err := w.n.runtimes.Driving(w.row.Plan.Class, w.row.Build)
	if err != nil {
		return err
	}
	if status, err := runtime.State(ctx, w.id()); err != nil || status != oci.Paused {
		return err
	}
	if err := runtime.Resume(ctx, w.id()); err != nil {
		return err
	}
	return w.sync(ctx)
}

// discard removes what a sandbox that sleeps does not keep.
func (w *operation) discard(ctx context.Context) error {
	switch w.row.Kept {
	case agents.SuspendFiles:
		return w.removeMemory(ctx)
	case agents.SuspendDelete:
		return errors.Join(w.removeRecord(ctx), w.removeOwnFiles(ctx), w.removeSnapshot(ctx))
	case agents.SuspendMemory:
	}
	return nil
}

// restartFromFiles is what a sandbox needs that is started anew from its files: all that a restart does, at an
// address that may be another.
func (w *operation) restartFromFiles(ctx context.Context) error {
	defer w.closeConsole()
	for _, s := range []step{
		{name: "network", do: w.attach},
		{name: "mount", do: w.mountAgain},
		{name: "readdress", do: w.readdress},
		{name: "start", do: w.start},
		{name: "agent", do: w.awaitAgent},
	} {
		if err := w.doOne(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// readdress writes into the files of a sandbox, which nothing of it has open, where it is now.
func (w *operation) readdress(ctx context.Context) error {
	if err := w.freshAgent(ctx); err != nil {
		return err
	}
	if !w.moved {
		return nil
	}
	if _, err := w.rewriteConfig(); err != nil {
		return err
	}
	return errs.Retryable(w.writeSystemFiles())
}

// fromClaims makes a sandbox of which only the volume claims are left, as if for the first time.
func (w *operation) fromClaims(ctx context.Context) error {
	image, err := w.n.findImage(ctx, &w.row.Plan)
	if err != nil {
		return err
	}
	w.image = image
	w.row.Digest, w.row.ImageEnv, w.row.ImageRun, w.row.Warmed = image.Digest, append([]string{}, image.Config.Env...), runOf(image), false
	return w.do(ctx)
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

// orFiles adds to an error for which memory cannot be used what can be done.
func orFiles(err error) error {
	if !errors.Is(err, errs.ErrConflict) {
		return err
	}
	return fmt.Errorf("%s; %s: %w", errs.Text(err), offersFiles, errs.ErrConflict)
}
