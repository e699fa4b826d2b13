// Package capture makes checkpoints of sandboxes. A running sandbox is paused while its memory is written and its files
// are copied; a suspended one stays as it is. The package does not choose what to capture, and keeps no checkpoints:
// package checkpoint has their rows and data.
//
// Lock order: the lock of the checkpoint, then that of its source.
package capture

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/programs"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

const (
	// maxConcurrent bounds the checkpoints that are made at the same time.
	maxConcurrent = 4
	// undoTimeout bounds the undo of a failed checkpoint, after its request has ended.
	undoTimeout = time.Minute
	// minResumePause and maxResumePause bound the pauses between two attempts to resume a source.
	minResumePause = time.Second
	maxResumePause = time.Minute
)

// Config is what New needs; every field is required.
type Config struct {
	Log         *slog.Logger
	Containerd  *ctrd.Client
	Host        *operation.Host
	Registry    *registry.Registry
	Checkpoints *checkpoint.Store
	Runtimes    *programs.Runtimes
	// Find loads a sandbox into the registry if the host has it.
	Find func(ctx context.Context, ref sandbox.Ref) error
	// Release removes from the host what a suspended sandbox on disk does not need.
	Release func(ctx context.Context, w *operation.Operation, u *registry.Handle) error
	// Refuse returns why the node accepts no new work, or nil; CheckSpace returns an error if a write of bytes below a
	// path does not fit.
	Refuse     func() error
	CheckSpace func(path string, bytes int64) error
	// Later runs a function in the background until the node stops.
	Later func(func(context.Context))
	// ObserveStep records the duration of a step.
	ObserveStep func(class, step string, took time.Duration)
}

// Maker makes checkpoints. Make it with New.
type Maker struct {
	cfg   Config
	slots chan struct{} // has an element for each checkpoint in progress
}

// New starts nothing.
func New(cfg Config) *Maker { return &Maker{cfg: cfg, slots: make(chan struct{}, maxConcurrent)} }

// Capture makes a checkpoint of a sandbox, or returns the one made before under the same UID. A running sandbox continues
// after the pause in which its memory is written and its files are copied; a suspended one stays suspended. When Capture
// returns nil, the checkpoint is durable. After an error the sandbox is as before, and nothing of the checkpoint is left.
//
// Without memory, the files are those on disk at the pause: files that a program was writing are as after a power failure.
//
// Kinds of error: errs.ErrConflict, the state of the sandbox does not allow it; errs.ErrInvalid, only the user can correct
// it; errs.ErrExhausted, the disk has too little space; errs.ErrUnavailable, a retry may succeed.
func (m *Maker) Capture(ctx context.Context, ask sandbox.Capture) (sandbox.Captured, error) {
	ref := ask.Checkpoint
	if err := errors.Join(checkpoint.CheckRef(ref), m.cfg.Checkpoints.CheckRead(ref)); err != nil {
		return sandbox.Captured{}, err
	}
	ctx, k, done, err := m.cfg.Checkpoints.Acquire(ctx, ref, false)
	if err != nil {
		return sandbox.Captured{}, err
	}
	defer done()
	c := k.Row()
	switch {
	case c != nil && c.Stage == checkpoint.Ready:
		return m.cfg.Checkpoints.Captured(c), nil
	case c != nil && c.Stage == checkpoint.Dropping:
		return sandbox.Captured{}, fmt.Errorf("checkpoint %s/%s is being removed: %w", ref.Namespace, ref.Name, errs.ErrConflict)
	case c != nil: // of an earlier attempt whose undo failed
		if err := m.cfg.Checkpoints.Erase(ctx, k); err != nil {
			return sandbox.Captured{}, err
		}
	}
	began := time.Now()
	if c, err = m.capture(ctx, k, ask); err != nil {
		return sandbox.Captured{}, fmt.Errorf("checkpoint %s/%s: %w", ref.Namespace, ref.Name, checkpoint.Fault(ctx, err))
	}
	m.cfg.ObserveStep(string(c.Plan.Class), "capture", time.Since(began))
	m.cfg.Log.InfoContext(ctx, "checkpoint made", telemetry.Namespace, ref.Namespace, "checkpoint", ref.Name, telemetry.Sandbox, ask.Source.Name,
		"memory", c.Memory != nil, "paused", c.Paused, telemetry.Duration, time.Since(began))
	return m.cfg.Checkpoints.Captured(c), nil
}

// capture makes the checkpoint, with the locks of the checkpoint and of its source held.
func (m *Maker) capture(ctx context.Context, k *checkpoint.Handle, ask sandbox.Capture) (*checkpoint.Row, error) {
	if err := m.cfg.Refuse(); err != nil {
		return nil, err
	}
	source := ask.Source
	if err := m.cfg.Find(ctx, source); err != nil {
		return nil, err
	}
	u := m.cfg.Registry.Lookup(source.UID)
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
	p := &work{Operation: m.cfg.Host.Operation(new(*r)), m: m, u: u, k: k, filesOnly: ask.FilesOnly || r.Plan.Class != oci.GVisor}
	if err := p.enter(ctx); err != nil { // not before the lock, whose holder may wait for an agent
		return nil, err
	}
	defer p.leave()
	if err := m.checkSpace(ctx, r, p.filesOnly); err != nil {
		return nil, err
	}
	p.c = m.newCheckpoint(ctx, ask, r)
	if p.filesOnly {
		p.c.Plan = r.Plan.Lasting()
	}
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

// enter waits for a slot among the checkpoints in progress. leave frees it, and may be repeated.
func (p *work) enter(ctx context.Context) error {
	select {
	case p.m.slots <- struct{}{}:
		p.entered = true
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for other checkpoints: %w", context.Cause(ctx))
	}
}

func (p *work) leave() {
	if p.entered {
		p.entered = false
		<-p.m.slots
	}
}

// capturable rejects a sandbox that has no state to capture.
func capturable(u *registry.Handle, r *journal.Row) error {
	switch {
	case u.IsRemoved() || r == nil || u.Observed().State == sandbox.ContainerExited:
		return fmt.Errorf("sandbox %s/%s is %s: %w", u.Ref.Namespace, u.Ref.Name, u.Observed().State, errs.ErrConflict)
	case r.KeepsClaims():
		return fmt.Errorf("sandbox %s/%s has only its volumes: %w", u.Ref.Namespace, u.Ref.Name, errs.ErrConflict)
	case r.Stage == journal.Live || r.Stage == journal.Paused || r.OnDisk():
		return nil
	default:
		return fmt.Errorf("sandbox %s/%s is %s; only a running or suspended one can be captured: %w", u.Ref.Namespace, u.Ref.Name, r.Stage, errs.ErrConflict)
	}
}

// newCheckpoint returns the row of a checkpoint before it is made.
func (m *Maker) newCheckpoint(ctx context.Context, ask sandbox.Capture, r *journal.Row) *checkpoint.Row {
	c := &checkpoint.Row{
		Ref: ask.Checkpoint, Plan: r.Plan, Images: r.Images, Program: r.Program, Created: time.Now().UTC(),
	}
	c.ContainerImage = m.known(ctx, r.Plan.Image, c.ContainerImage)
	c.Sidecars = maps.Clone(c.Sidecars)
	for _, of := range r.Plan.Sidecars {
		c.Sidecars[of.Name] = m.known(ctx, of.Image, c.Sidecars[of.Name])
	}
	return c
}

// known adds the configuration of an image that an older row lacks, if its name still refers to it.
func (m *Maker) known(ctx context.Context, ref string, was plan.ContainerImage) plan.ContainerImage {
	if was.ImageRun == nil {
		if img, err := m.cfg.Containerd.Resolve(ctx, ref); err == nil && img.Digest == was.Digest {
			was.ImageRun = plan.RecordOf(img).ImageRun
		}
	}
	return was
}

// undo removes the checkpoint. The source runs already, or is about to: see whilePaused.
func (p *work) undo(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return p.m.cfg.Checkpoints.Erase(ctx, p.k)
}

// note writes the row of the checkpoint.
func (p *work) note(s checkpoint.Stage) error {
	if err := p.m.cfg.Checkpoints.Move(p.k, p.c, s); err != nil {
		return err
	}
	if s == checkpoint.Ready {
		failpoint.Reach("checkpoint/ready")
	} else {
		failpoint.Reach("checkpoint/writing")
	}
	return nil
}

// checkSpace returns an error if the checkpoint does not fit on the disk. It checks the sum of all writes. Memory that is on
// disk already is shared and not counted; nor are volumes.
func (m *Maker) checkSpace(ctx context.Context, r *journal.Row, filesOnly bool) error {
	bytes, err := m.cfg.Host.DiskUsed(ctx, r)
	if err != nil {
		return err
	}
	if !filesOnly && !r.OnDisk() {
		memory, err := m.cfg.Host.MemoryOf(r)
		if err != nil {
			return err
		}
		bytes += memory
	}
	return m.cfg.CheckSpace(m.cfg.Checkpoints.Root(), bytes)
}
