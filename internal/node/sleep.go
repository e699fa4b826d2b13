package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Suspend puts a sandbox to sleep, with what the mode keeps; empty means agents.SuspendMemory:
//
//	Memory  its processes stop where they are and keep their memory, which is moved to disk after
//	        Config.StoreAfter. A sandbox of class runc keeps its files only
//	Files   its processes end; its files, volumes and identity stay
//	Delete  all of it goes but its volume claims, and it is observed as absent
//
// One that sleeps already is left as it is, whatever it keeps: only what runs can be asked to keep
// something else. After an error it runs on, or, where the decision was noted, it sleeps and the
// releaseResources is tried again.
func (n *Node) Suspend(ctx context.Context, ref sandbox.Ref, mode agents.SuspendMode) (sandbox.Observed, error) {
	switch mode {
	case "", agents.SuspendMemory, agents.SuspendFiles, agents.SuspendDelete:
	default:
		return sandbox.Observed{}, fmt.Errorf("spec.barchan.suspend: %q is none of %s, %s, %s: %w",
			mode, agents.SuspendMemory, agents.SuspendFiles, agents.SuspendDelete, errs.ErrInvalid)
	}
	return n.inTurn(ctx, ref, func(ctx context.Context, u *registry.Handle, r *journal.Row) error { return n.suspend(ctx, u, r, mode) })
}

// Resume lets a sandbox that sleeps go on where it was, wherever its memory is; while that is
// being moved, it waits. One that keeps no memory is started anew from what it keeps. One that runs
// is left as it is.
//
// From disk the sandbox has the address that it had, unless that was given back, the processes,
// their numbers, memory, files and listening sockets; connections to the outside have ended. An
// errs.ErrConflict says why its memory cannot be used: that needs the runtime's build and the
// features of the processor that it was written with, and must be undamaged. After any error it
// sleeps as before.
//
// With filesOnly the memory is given up, for good, and the sandbox started anew from its files.
func (n *Node) Resume(ctx context.Context, ref sandbox.Ref, filesOnly bool) (sandbox.Observed, error) {
	return n.inTurn(ctx, ref, func(ctx context.Context, u *registry.Handle, r *journal.Row) error {
		return n.resume(ctx, u, r, filesOnly)
	})
}

// inTurn does something with a sandbox that lives or sleeps, in its turn.
func (n *Node) inTurn(ctx context.Context, ref sandbox.Ref, do func(ctx context.Context, u *registry.Handle, r *journal.Row) error) (sandbox.Observed, error) {
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

// suspend does the work of Suspend, in the unit's turn.
func (n *Node) suspend(ctx context.Context, u *registry.Handle, r *journal.Row, mode agents.SuspendMode) error {
	mode = cmp.Or(mode, agents.SuspendMemory)
	if mode == agents.SuspendMemory && r.Plan.Class != oci.GVisor {
		mode = agents.SuspendFiles
	}
	if r.Stage == journal.Pausing && mode != agents.SuspendMemory {
		n.settle(ctx, u, r) // asked to keep its memory before, and the answer was lost
		if r = u.Row(); r.Stage == journal.Paused {
			n.setPaused(u, r)
		}
	}
	switch {
	case r.Stage == journal.Paused || r.OnDisk():
		return nil
	case r.Stage == journal.Live && mode != agents.SuspendMemory:
		return n.suspendToFiles(ctx, u, r, mode)
	case r.Stage != journal.Live && r.Stage != journal.Pausing:
		return fmt.Errorf("it is %s: %w", r.Stage, errs.ErrConflict)
	}
	return n.freezeOrThaw(ctx, u, r, journal.Pausing, n.freeze)
}

// resume does the work of Resume, in the unit's turn.
func (n *Node) resume(ctx context.Context, u *registry.Handle, r *journal.Row, filesOnly bool) error {
	switch {
	case r.Stage == journal.Live:
		return nil
	case r.OnDisk(), filesOnly && (r.Stage == journal.Paused || r.Stage == journal.Resuming):
		return n.wake(ctx, u, r, filesOnly)
	case r.Stage != journal.Paused && r.Stage != journal.Resuming:
		return fmt.Errorf("it is %s: %w", r.Stage, errs.ErrConflict)
	}
	return n.freezeOrThaw(ctx, u, r, journal.Resuming, n.thaw)
}

// freezeOrThaw notes a stage and does what it stands for. After a failure the runtime is asked what
// the sandbox does.
func (n *Node) freezeOrThaw(ctx context.Context, u *registry.Handle, r *journal.Row, by journal.Stage, do func(context.Context, *oci.Runtime, *registry.Handle, *journal.Row) error) error {
	runtime, err := n.runtimes.Driving(r.Plan.Class, r.Build)
	if err != nil {
		return operation.OrFiles(err)
	}
	changed := *r
	if err := n.handles.Note(u, &changed, by); err != nil {
		return err
	}
	if err := do(ctx, runtime, u, &changed); err != nil {
		n.settle(context.WithoutCancel(ctx), u, &changed)
		return err
	}
	return nil
}

// freeze stops a sandbox's processes where they are.
func (n *Node) freeze(ctx context.Context, runtime *oci.Runtime, u *registry.Handle, r *journal.Row) error {
	if err := runtime.Pause(ctx, string(u.ID)); err != nil {
		return errs.Retryable(err)
	}
	failpoint.Reach("node/frozen")
	r.PausedAt = time.Now()
	if err := n.handles.Note(u, r, journal.Paused); err != nil {
		return err
	}
	n.setPaused(u, r)
	return nil
}

// thaw lets frozen processes go on.
func (n *Node) thaw(ctx context.Context, runtime *oci.Runtime, u *registry.Handle, r *journal.Row) error {
	if err := runtime.Resume(ctx, string(u.ID)); err != nil {
		return errs.Retryable(err)
	}
	failpoint.Reach("node/thawed")
	u.SetStore(nil)
	r.StartedAt, r.PausedAt = time.Now(), time.Time{}
	if err := n.handles.Note(u, r, journal.Live); err != nil {
		return err
	}
	u.Update(func(o *sandbox.Observed) {
		o.State, o.StartedAt, o.Message = sandbox.ContainerRunning, r.StartedAt, ""
		if !o.Probed {
			o.Message = probesNotAgain
		}
	})
	agent, err := n.host.AgentOf(u.ID, r.Address)
	if err != nil {
		return err
	}
	now := time.Now()
	if err := agent.Init(ctx, envd.InitRequest{Timestamp: &now}); err != nil && !errors.Is(err, context.Canceled) {
		n.log.WarnContext(ctx, "agent not told of the time after a resume", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
	return nil
}

// setPaused makes a sandbox seen as frozen, and plans to move its memory to disk.
func (n *Node) setPaused(u *registry.Handle, r *journal.Row) {
	u.Update(func(o *sandbox.Observed) {
		o.State, o.Memory, o.Message = sandbox.ContainerPaused, r.Place(), whereOf(r)
	})
	n.storeLater(u, r)
}
