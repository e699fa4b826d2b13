package operation

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// VolumeSource is the host directory of a volume's data.
func (w *Operation) VolumeSource(v plan.Volume) string {
	if v.Claim != "" {
		return w.host.Disks(w.Row).Claim(v.Claim)
	}
	return w.host.Disks(w.Row).Scratch(v.Scratch)
}

// RestoresMemory reports whether a sandbox's processes come from a checkpoint.
func (w *Operation) RestoresMemory() bool { return w.Origin != nil && w.Origin.WithMemory }

// RestoreFilesHint is the remedy for unusable memory of a checkpoint.
const RestoreFilesHint = "spec.barchan.restore.filesOnly: true works without it"

// agentProgram is the agent of a new sandbox: the node's, or that of its checkpoint, whose processes in
// memory have that very file open.
func (w *Operation) agentProgram() string {
	if w.RestoresMemory() {
		return w.host.cfg.Checkpoints.AgentFile(w.Origin.Ref.UID)
	}
	return w.host.AgentFile
}

// FindImage finds the image of the container: that of its checkpoint if both name the same, even if the name now belongs to
// another image.
func (w *Operation) FindImage(ctx context.Context) (err error) {
	p, name, at := &w.Row.Plan, w.sidecar(), ""
	if w.part == "" {
		at = "spec.podTemplate.spec.containers[0]."
	}
	var origin plan.ContainerImage
	var was string
	if w.Origin != nil {
		origin, was = w.Origin.ImageOf(name), w.Origin.Plan.ImageOf(name)
	}
	if origin.ImageRun != nil && p.Image == was {
		w.Image = origin.Image()
	} else {
		var progress func(ctrd.Progress)
		if w.Pulling != nil {
			progress = w.Pulling()
		}
		if w.Image, err = w.host.findImage(ctx, p, progress); err != nil {
			return err
		}
	}
	if w.Origin != nil && w.Image.Digest != origin.Digest {
		return fmt.Errorf("%simage: %q is %s here, the checkpoint's is %q, %s: %w", at, p.Image, w.Image.Digest, was, origin.Digest, errs.ErrInvalid)
	}
	w.Row.ContainerImage = plan.RecordOf(w.Image)
	return nil
}

// prepareRoot creates the snapshot of the container's files, from its image or its checkpoint.
func (w *Operation) prepareRoot(ctx context.Context) (err error) {
	if w.Origin == nil {
		return w.prepare(ctx)
	}
	w.rootfs, err = w.host.cfg.Containerd.PrepareFrom(ctx, w.snapshotKey(), checkpoint.Snapshot(w.Origin.Ref.UID, w.sidecar()))
	if errors.Is(err, errs.ErrNotFound) {
		return fmt.Errorf("spec.barchan.restore: files of the checkpoint are missing: %w", err)
	}
	return err
}

// verifyOrigin verifies the memory of the checkpoint, once for all sandboxes from it.
func (w *Operation) verifyOrigin(ctx context.Context) error {
	if !w.RestoresMemory() {
		return nil
	}
	uid := w.Origin.Ref.UID
	return w.damagedOrigin(w.host.cfg.Checkpoints.Verify(ctx, uid))
}

func (w *Operation) damagedOrigin(err error) error {
	if errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrNotFound) {
		return fmt.Errorf("spec.barchan.restore: the memory of the checkpoint is damaged: %s; %s: %w", errs.Text(err), RestoreFilesHint, errs.ErrInvalid)
	}
	return errs.Retryable(err)
}

// fillVolumes copies the checkpoint's volume data into the sandbox's new volumes, once for all containers.
func (w *Operation) fillVolumes(ctx context.Context) error {
	if w.Origin == nil || w.part != "" {
		return nil
	}
	p := w.Row.Plan
	if !w.RestoresMemory() {
		p = p.Lasting()
	}
	for _, v := range p.DataVolumes() {
		from, to := filepath.Join(w.host.cfg.Checkpoints.Dir(w.Origin.Ref.UID), "volumes", v.DataPath()), w.VolumeSource(v)
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

func (w *Operation) startOrRestore(ctx context.Context) error {
	if !w.RestoresMemory() {
		return w.start(ctx)
	}
	runtime, err := w.host.cfg.Runtimes.ForBuild(w.Origin.Memory.Build)
	if err != nil {
		return err
	}
	if err := w.Origin.AwaitSlot(ctx, w.host.restores); err != nil {
		return err
	}
	w.Row.Build = w.Origin.Memory.Build.SHA256
	return w.damagedOrigin(w.restoreContainers(ctx, runtime, w.host.cfg.Checkpoints.MemoryDir(w.Origin.Ref.UID)))
}

// slotTimeout is how long a restored agent's silence keeps other restores waiting. It may be one that a tenant has replaced.
const slotTimeout = time.Second

// awaitNewAgent waits until the agent responds, and sends it the sandbox's identity.
func (w *Operation) awaitNewAgent(ctx context.Context) error {
	if w.RestoresMemory() {
		defer w.Origin.ReleaseSlot()
		defer time.AfterFunc(slotTimeout, w.Origin.ReleaseSlot).Stop()
		return w.awaitRestored(ctx)
	}
	return w.awaitAgent(ctx)
}

// warmUp runs the template's warm-up, unless the restored memory includes it.
func (w *Operation) warmUp(ctx context.Context) error {
	if c := w.Row.Plan.WarmUp; c != nil && !w.RestoresMemory() {
		if err := w.host.Agents.WarmUp(ctx, w.conn(), c); err != nil {
			return err
		}
	}
	w.Row.Warmed = w.Row.Plan.WarmUp != nil
	return nil
}
