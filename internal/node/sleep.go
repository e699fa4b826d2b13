package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/internal/envd"
	"github.com/barchan-dev/barchan/internal/errs"
	"github.com/barchan-dev/barchan/internal/sandbox"
	"github.com/barchan-dev/barchan/internal/telemetry"
)

// Suspend freezes a sandbox: its processes stop where they are and keep their memory, which is
// moved to disk after Config.StoreAfter. One that sleeps already is left as it is.
func (n *Node) Suspend(ctx context.Context, ref sandbox.Ref) (sandbox.Observed, error) {
	return n.sleepOrWake(ctx, ref, live, pausing, paused)
}

// Resume lets a sandbox that sleeps go on where it was, wherever its memory is; while that is
// being moved, it waits. One that runs is left as it is.
//
// From disk the sandbox has the address that it had, the processes, their numbers, memory,
// files and listening sockets; connections to the outside have ended. An errs.ErrConflict says
// what of the server must change first: memory on disk needs the runtime's build and the
// features of the processor that it was written with. After any error it sleeps as before.
func (n *Node) Resume(ctx context.Context, ref sandbox.Ref) (sandbox.Observed, error) {
	return n.sleepOrWake(ctx, ref, paused, resuming, live)
}

// sleepOrWake moves a sandbox between two stages by way of a third.
func (n *Node) sleepOrWake(ctx context.Context, ref sandbox.Ref, from, by, to stage) (sandbox.Observed, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Observed{}, err
	}
	u := n.lookup(ref.UID)
	if u == nil {
		return n.absent(), fmt.Errorf("sandbox %s/%s is not on this node: %w", ref.Namespace, ref.Name, errs.ErrConflict)
	}
	u.claim()
	ctx, done, err := u.take(ctx)
	if err != nil {
		return u.observed(), err
	}
	defer done()
	r := u.current()
	switch {
	case u.buried() || r == nil || u.observed().State == sandbox.ContainerExited:
		return u.observed(), fmt.Errorf("sandbox %s/%s is %s: %w", ref.Namespace, ref.Name, u.observed().State, errs.ErrConflict)
	case r.Stage == to, r.onDisk() && to == paused:
		return u.observed(), nil
	case r.onDisk():
		if err := n.wake(ctx, u, r); err != nil {
			return u.observed(), fmt.Errorf("sandbox %s/%s: %w", ref.Namespace, ref.Name, err)
		}
		return u.observed(), nil
	case r.Stage != from && r.Stage != by:
		return u.observed(), fmt.Errorf("sandbox %s/%s is %s: %w", ref.Namespace, ref.Name, r.Stage, errs.ErrConflict)
	}
	changed := *r
	if err := n.note(u, &changed, by); err != nil {
		return u.observed(), err
	}
	if err := n.freezeOrThaw(ctx, u, &changed, to); err != nil {
		n.settle(context.WithoutCancel(ctx), u, &changed)
		return u.observed(), fmt.Errorf("sandbox %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return u.observed(), nil
}

func (n *Node) freezeOrThaw(ctx context.Context, u *unit, r *row, to stage) error {
	runtime, err := n.runtimeOf(r.Plan.Class)
	if err != nil {
		return err
	}
	if to == paused {
		if err := runtime.Pause(ctx, string(u.id)); err != nil {
			return unavailable(err)
		}
		r.PausedAt = time.Now()
		if err := n.note(u, r, paused); err != nil {
			return err
		}
		n.fellAsleep(u, r)
		return nil
	}
	if err := runtime.Resume(ctx, string(u.id)); err != nil {
		return unavailable(err)
	}
	u.setStore(nil)
	r.StartedAt, r.PausedAt = time.Now(), time.Time{}
	if err := n.note(u, r, live); err != nil {
		return err
	}
	u.see(func(o *sandbox.Observed) {
		o.State, o.StartedAt, o.Message = sandbox.ContainerRunning, r.StartedAt, ""
		if !o.Probed {
			o.Message = probesNotAgain
		}
	})
	agent, err := n.agentOf(u.id, r.Address)
	if err != nil {
		return err
	}
	now := time.Now()
	if err := agent.Init(ctx, envd.InitRequest{Timestamp: &now}); err != nil && !errors.Is(err, context.Canceled) {
		n.log.WarnContext(ctx, "agent not told of the time after a resume", telemetry.Sandbox, u.ref.Name, telemetry.Error, err)
	}
	return nil
}

// fellAsleep makes a sandbox seen as frozen, and plans to move its memory to disk.
func (n *Node) fellAsleep(u *unit, r *row) {
	u.see(func(o *sandbox.Observed) { o.State, o.Message = sandbox.ContainerPaused, r.where() })
	n.storeLater(u, r)
}
