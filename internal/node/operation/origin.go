package operation

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/oci"
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

// prepareRoot creates the snapshot of the sandbox's files, from its image or its checkpoint.
func (w *Operation) prepareRoot(ctx context.Context) (err error) {
	if w.Origin == nil {
		return w.prepare(ctx)
	}
	w.rootfs, err = w.host.cfg.Containerd.PrepareFrom(ctx, w.ID(), checkpoint.Snapshot(w.Origin.Ref.UID))
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

// fillVolumes copies the checkpoint's volume data into the sandbox's new volumes.
func (w *Operation) fillVolumes(ctx context.Context) error {
	if w.Origin == nil {
		return nil
	}
	made, volumes := map[string]bool{}, w.Row.Plan.Volumes
	if !w.RestoresMemory() {
		volumes = plan.Lasting(volumes)
	}
	for _, v := range volumes {
		rel := v.DataPath()
		if rel == "" || made[rel] {
			continue
		}
		made[rel] = true
		from, to := filepath.Join(w.host.cfg.Checkpoints.Dir(w.Origin.Ref.UID), "volumes", rel), w.VolumeSource(v)
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

func (w *Operation) startOrRestore(ctx context.Context) (err error) {
	if !w.RestoresMemory() {
		return w.start(ctx)
	}
	program, err := w.host.cfg.Runtimes.ForBuild(w.Origin.Memory.Build)
	if err != nil {
		return err
	}
	if w.console, err = oci.NewConsole(); err != nil {
		return errs.Retryable(err)
	}
	if err := w.Origin.AwaitSlot(ctx, w.host.restores); err != nil {
		return err
	}
	w.Row.Build = w.Origin.Memory.Build.SHA256
	image := w.host.cfg.Checkpoints.MemoryDir(w.Origin.Ref.UID)
	pid, err := program.Restore(ctx, w.ID(), w.host.Dir(w.ID()), image, w.console, oci.RestoreOptions{Background: true, Later: w.host.cfg.Later})
	if err != nil {
		return w.damagedOrigin(err)
	}
	if w.Row.Process, err = lifecycle.ProcessOf(pid); err != nil {
		return errs.Retryable(fmt.Errorf("container exited at once: %w: %s", err, w.console.Text()))
	}
	w.Row.StartedAt = time.Now()
	return nil
}

// awaitNewAgent waits until the agent responds, and sends it the sandbox's identity.
func (w *Operation) awaitNewAgent(ctx context.Context) error {
	if w.RestoresMemory() {
		defer w.Origin.ReleaseSlot()
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
