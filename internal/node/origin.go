package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"

	"connectrpc.com/connect"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

func runOf(img ctrd.Image) *plan.ImageRun {
	c := &img.Config
	return &plan.ImageRun{Ref: img.Ref, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Workdir: c.WorkingDir, User: c.User}
}

// restoresMemory reports whether a sandbox's processes come from a checkpoint.
func (w *operation) restoresMemory() bool { return w.origin != nil && w.origin.WithMemory }

// originOf finds the checkpoint that a sandbox wants to be made from, if any, and holds it. Errors
// are those of Ensure.
func (n *Node) originOf(ctx context.Context, s *agents.Sandbox, p *plan.Plan) (*checkpoint.Origin, error) {
	if s.Spec.Barchan == nil || s.Spec.Barchan.Restore == nil {
		return nil, nil
	}
	ask := s.Spec.Barchan.Restore
	const at = "spec.barchan.restore.checkpointName"
	k := n.checkpoints.Named(s.Namespace, ask.CheckpointName)
	if k == nil {
		return nil, fmt.Errorf("%s: checkpoint %q is not on this node: %w", at, ask.CheckpointName, errs.ErrNotFound)
	}
	c, release, ok := k.Open()
	if !ok {
		return nil, fmt.Errorf("%s: checkpoint %q is being made or removed: %w", at, ask.CheckpointName, errs.ErrUnavailable)
	}
	o := &checkpoint.Origin{Row: c, Release: release, WithMemory: c.Memory != nil && !ask.FilesOnly, Disconnect: func() {}}
	p.Restore = &plan.Restoring{Checkpoint: c.Ref.UID, FilesOnly: !o.WithMemory}
	err := p.Fits(&c.Plan, o.WithMemory)
	if err == nil && o.WithMemory {
		err = n.checkRestores(ctx, o.Memory.Build)
	}
	if err != nil {
		release()
		return nil, fmt.Errorf("spec.barchan.restore: checkpoint %q: %w", ask.CheckpointName, err)
	}
	return o, nil
}

// filesWork is said where memory cannot be restored.
const filesWork = "spec.barchan.restore.filesOnly: true works without it"

// checkRestores finds what would prevent that memory of a build is restored, before anything is touched.
func (n *Node) checkRestores(ctx context.Context, was memimage.Build) error {
	program, err := n.runtimes.ForBuild(was)
	if errors.Is(err, errs.ErrConflict) { // the one that is here says what both are called
		program, err = n.runtimes.Of(oci.GVisor)
	}
	if err == nil {
		var build memimage.Build
		if build, err = program.Build(ctx); err == nil {
			err = build.Restores(was)
		}
	}
	if errors.Is(err, errs.ErrConflict) {
		return fmt.Errorf("its memory cannot be restored here: %s; %s: %w", errs.Text(err), filesWork, errs.ErrInvalid)
	}
	return errs.Retryable(err)
}

// imageFor is the image that a sandbox is made of: that of its checkpoint, where the sandbox names the
// same; a name that has moved on to another is the checkpoint's affair no more.
func (n *Node) imageFor(ctx context.Context, p *plan.Plan, o *checkpoint.Origin) (ctrd.Image, error) {
	if o == nil {
		return n.findImage(ctx, p)
	}
	if o.ImageRun != nil && p.Image == o.Plan.Image {
		return o.Image(), nil
	}
	image, err := n.findImage(ctx, p)
	if err == nil && image.Digest != o.Digest {
		err = fmt.Errorf("spec.podTemplate.spec.containers[0].image: %q is %s here, the checkpoint's is %q, %s: %w",
			p.Image, image.Digest, o.Plan.Image, o.Digest, errs.ErrInvalid)
	}
	return image, err
}

// agentProgram is the agent that a new sandbox gets: the node's, or the one whose processes are in the
// memory of its checkpoint, which have that very file open.
func (w *operation) agentProgram() string {
	if w.restoresMemory() {
		return w.n.checkpoints.AgentFile(w.origin.Ref.UID)
	}
	return w.n.agentFile
}

// prepareRoot makes the snapshot that has the sandbox's files, of its image or of its checkpoint.
func (w *operation) prepareRoot(ctx context.Context) (err error) {
	if w.origin == nil {
		return w.prepare(ctx)
	}
	w.rootfs, err = w.n.cfg.Containerd.PrepareFrom(ctx, w.id(), checkpoint.Snapshot(w.origin.Ref.UID))
	if errors.Is(err, errs.ErrNotFound) {
		return fmt.Errorf("spec.barchan.restore: the files of the checkpoint are gone: %w", err)
	}
	return err
}

// verifyOrigin reads the memory of the checkpoint through, once for all that are made from it.
func (w *operation) verifyOrigin(ctx context.Context) error {
	if !w.restoresMemory() {
		return nil
	}
	uid := w.origin.Ref.UID
	return w.damagedOrigin(w.n.checkpoints.Verify(ctx, uid))
}

// damagedOrigin is the error for a checkpoint's memory that cannot be read.
func (w *operation) damagedOrigin(err error) error {
	if errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrNotFound) {
		return fmt.Errorf("spec.barchan.restore: the memory of the checkpoint is damaged: %s; %s: %w", errs.Text(err), filesWork, errs.ErrInvalid)
	}
	return errs.Retryable(err)
}

// fillVolumes copies what the checkpoint has of volumes into the sandbox's own, which are new.
func (w *operation) fillVolumes(ctx context.Context) error {
	if w.origin == nil {
		return nil
	}
	made := map[string]bool{}
	for _, v := range w.row.Plan.Volumes {
		rel := v.DataPath()
		if rel == "" || made[rel] {
			continue
		}
		made[rel] = true
		from, to := filepath.Join(w.n.checkpoints.Dir(w.origin.Ref.UID), "volumes", rel), w.volumeSource(v)
		if err := os.RemoveAll(to); err != nil {
			return errs.Retryable(fmt.Errorf("fill volume: %w", err))
		}
		if err := os.MkdirAll(to, 0o755); err != nil {
			return errs.Retryable(fmt.Errorf("fill volume: %w", err))
		}
		if err := filetree.NewCopy(to, from).FinalCopy(ctx); err != nil {
			return errs.Retryable(fmt.Errorf("fill volume: %w", err))
		}
	}
	return nil
}

// begin starts the container, or restores it.
func (w *operation) begin(ctx context.Context) (err error) {
	if !w.restoresMemory() {
		return w.start(ctx)
	}
	program, err := w.n.runtimes.ForBuild(w.origin.Memory.Build)
	if err != nil {
		return err
	}
	if w.console, err = oci.NewConsole(); err != nil {
		return errs.Retryable(err)
	}
	if err := w.origin.AwaitPlace(ctx, w.n.restores); err != nil {
		return err
	}
	w.row.Build = w.origin.Memory.Build.SHA256
	image := w.n.checkpoints.MemoryDir(w.origin.Ref.UID)
	pid, err := program.Restore(ctx, w.id(), w.n.dir(w.id()), image, w.console, oci.RestoreOptions{Background: true, Later: w.n.tasks.Start})
	if err != nil {
		return w.damagedOrigin(err)
	}
	if w.row.Process, err = lifecycle.ProcessOf(pid); err != nil {
		return errs.Retryable(fmt.Errorf("it ended at once: %w: %s", err, w.console.Text()))
	}
	w.row.StartedAt = time.Now()
	return nil
}

// meetAgent returns when the agent has answered, and knows whose it is.
func (w *operation) meetAgent(ctx context.Context) error {
	if w.restoresMemory() {
		defer w.origin.Disconnect()
		return w.awaitRestored(ctx)
	}
	return w.awaitAgent(ctx)
}

// warmUp runs the template's preparation, unless the memory has it.
func (w *operation) warmUp(ctx context.Context) error {
	p := &w.row.Plan
	if p.WarmUp == nil || w.restoresMemory() {
		w.row.Warmed = p.WarmUp != nil
		return nil
	}
	agent, err := w.n.agentOf(p.ID, w.row.Address)
	if err != nil {
		return err
	}
	limit := time.Duration(p.WarmUp.TimeoutSeconds) * time.Second
	if limit <= 0 {
		limit = defaultWarmUp
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	code, tail, err := agent.Run(limited, p.WarmUp.Command, envd.RunOptions{})
	switch {
	case err != nil && ctx.Err() == nil && limited.Err() != nil:
		return fmt.Errorf("spec.barchan.warmUp: it did not end within %s: %q: %w", limit, tail, errs.ErrInvalid)
	case err != nil && envd.IsCode(err, connect.CodeInvalidArgument):
		return fmt.Errorf("spec.barchan.warmUp.command: %w: %w", err, errs.ErrInvalid)
	case err != nil:
		return errs.Retryable(fmt.Errorf("warm up: %w", err))
	case code != 0:
		return fmt.Errorf("spec.barchan.warmUp: %q ended with code %d: %q: %w", p.WarmUp.Command[0], code, tail, errs.ErrInvalid)
	}
	w.row.Warmed = true
	return nil
}

// defaultWarmUp bounds a warm-up that sets no bound.
const defaultWarmUp = 5 * time.Minute
