package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// capturesAtOnce bounds how many checkpoints are made at the same time.
const capturesAtOnce = 4

// Capture makes a checkpoint of a sandbox, or returns the one that was made before under the same
// UID. A sandbox that runs goes on, after it has stood still while its memory is written and its files
// are copied; one that sleeps sleeps on. When it returns, the checkpoint is durable. After an error
// the sandbox does what it did before, and nothing of the checkpoint is left.
//
// Without memory, files are as they were written when the sandbox stood still, and those of programs
// that were in the middle of writing are as after a failure of power.
//
// Kinds of error: errs.ErrConflict, the sandbox is not in a state for it, such as one that has ended;
// errs.ErrInvalid, where only the user can help; errs.ErrExhausted, the disk is full, or too full for it;
// errs.ErrUnavailable, where a retry may help.
func (n *Node) Capture(ctx context.Context, ask sandbox.Capture) (sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Captured{}, err
	}
	ref := ask.Checkpoint
	if err := errors.Join(checkpoint.CheckRef(ref), n.checkpoints.CheckRead(ref)); err != nil {
		return sandbox.Captured{}, err
	}
	ctx, k, done, err := n.checkpoints.Acquire(ctx, ref, false)
	if err != nil {
		return sandbox.Captured{}, err
	}
	defer done()
	c := k.Row()
	switch {
	case c != nil && c.Stage == checkpoint.Ready:
		return n.checkpoints.Captured(c), nil
	case c != nil && c.Stage == checkpoint.Dropping:
		return sandbox.Captured{}, fmt.Errorf("checkpoint %s/%s is being removed: %w", ref.Namespace, ref.Name, errs.ErrConflict)
	case c != nil: // an earlier attempt could not be taken back
		if err := n.checkpoints.Erase(ctx, k); err != nil {
			return sandbox.Captured{}, err
		}
	}
	began := time.Now()
	if c, err = n.capture(ctx, k, ask); err != nil {
		return sandbox.Captured{}, fmt.Errorf("checkpoint %s/%s: %w", ref.Namespace, ref.Name, checkpoint.Fault(ctx, err))
	}
	n.observeStep(c.Plan.Class, "capture", time.Since(began))
	n.log.InfoContext(ctx, "checkpoint made", telemetry.Namespace, ref.Namespace, "checkpoint", ref.Name, telemetry.Sandbox, ask.Source.Name,
		"memory", c.Memory != nil, "paused", c.Paused, telemetry.Duration, time.Since(began))
	return n.checkpoints.Captured(c), nil
}

// capture does the work of Capture, in the turns of the checkpoint and of its source.
func (n *Node) capture(ctx context.Context, k *checkpoint.Handle, ask sandbox.Capture) (*checkpoint.Row, error) {
	if err := n.refused(); err != nil {
		return nil, err
	}
	select {
	case n.captures <- struct{}{}:
		defer func() { <-n.captures }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for other checkpoints: %w", context.Cause(ctx))
	}
	source := ask.Source
	if err := n.find(ctx, source); err != nil {
		return nil, err
	}
	u := n.handles.Lookup(source.UID)
	if u == nil {
		return nil, fmt.Errorf("sandbox %s/%s is not on this node: %w", source.Namespace, source.Name, errs.ErrConflict)
	}
	u.SetDesired()
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	r := u.Row()
	if err := capturable(u, r); err != nil {
		return nil, err
	}
	p := &capture{Operation: n.host.Operation(new(*r)), n: n, u: u, k: k, filesOnly: ask.FilesOnly || r.Plan.Class != oci.GVisor}
	if err := n.roomToCapture(ctx, r, p.filesOnly); err != nil {
		return nil, err
	}
	p.c = n.newCheckpoint(ctx, ask, r)
	limited, cancel := context.WithTimeout(ctx, operation.DiskTimeout)
	defer cancel()
	if err := p.do(limited); err != nil {
		if errors.Is(err, operation.ErrCrash) {
			return nil, err
		}
		return nil, errors.Join(err, p.undo(ctx))
	}
	return p.c, nil
}

// capturable refuses what has no state to keep.
func capturable(u *registry.Handle, r *journal.Row) error {
	switch {
	case u.IsRemoved() || r == nil || u.Observed().State == sandbox.ContainerExited:
		return fmt.Errorf("sandbox %s/%s is %s: %w", u.Ref.Namespace, u.Ref.Name, u.Observed().State, errs.ErrConflict)
	case r.KeepsClaims():
		return fmt.Errorf("sandbox %s/%s has nothing but its volumes: %w", u.Ref.Namespace, u.Ref.Name, errs.ErrConflict)
	case r.Stage == journal.Live || r.Stage == journal.Paused || r.OnDisk():
		return nil
	default:
		return fmt.Errorf("sandbox %s/%s is %s; a checkpoint is made of one that runs or sleeps: %w", u.Ref.Namespace, u.Ref.Name, r.Stage, errs.ErrConflict)
	}
}

// newCheckpoint is what is known of a checkpoint before it is made.
func (n *Node) newCheckpoint(ctx context.Context, ask sandbox.Capture, r *journal.Row) *checkpoint.Row {
	c := &checkpoint.Row{
		Ref: ask.Checkpoint, Plan: r.Plan, Digest: r.Digest, ImageEnv: r.ImageEnv, ImageRun: r.ImageRun, Program: r.Program, Created: time.Now().UTC(),
	}
	if c.ImageRun == nil { // of a row from before it was kept
		if img, err := n.cfg.Containerd.Resolve(ctx, r.Plan.Image); err == nil && img.Digest == r.Digest {
			c.ImageRun = operation.RunOf(img)
		}
	}
	return c
}

// undo removes what was made, and leaves the source as it was, which whoever held it still has seen to.
func (p *capture) undo(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return p.n.checkpoints.Erase(ctx, p.k)
}

// note writes the checkpoint's row.
func (p *capture) note(s checkpoint.Stage) error {
	if err := p.n.checkpoints.Move(p.k, p.c, s); err != nil {
		return err
	}
	if s == checkpoint.Ready {
		failpoint.Reach("checkpoint/ready")
	} else {
		failpoint.Reach("checkpoint/writing")
	}
	return nil
}
