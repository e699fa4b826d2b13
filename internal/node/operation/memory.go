package operation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// resumeFilesHint is the remedy for unusable memory.
const resumeFilesHint = "resume it from its files only with spec.barchan.resume: Files, or memory=false in the API"

// OrFiles adds the remedy to an error of unusable memory.
func OrFiles(err error) error {
	if !errors.Is(err, errs.ErrConflict) {
		return err
	}
	return fmt.Errorf("%s; %s: %w", errs.Text(err), resumeFilesHint, errs.ErrConflict)
}

func (w *Operation) checkpoint(ctx context.Context) error {
	runtime, err := w.host.Runtime(w.Row)
	if err != nil {
		return err
	}
	if err := w.RemoveMemory(ctx); err != nil { // of an earlier attempt
		return errs.Retryable(err)
	}
	if err := w.host.checkMemorySpace(w.Row); err != nil {
		return err
	}
	img, err := w.Checkpoint(ctx, runtime, w.host.MemoryDir(w.ID()), oci.CheckpointOptions{})
	if err != nil {
		return errs.Retryable(err)
	}
	w.Row.Memory = &journal.Memory{Build: img.Build, Size: img.Size(), Created: img.Created}
	return nil
}

// Checkpoint writes the memory of a sandbox to a directory ([oci.Runtime.Checkpoint]). Meanwhile its programs do not run, and its kernel
// may use more than their CPU limit. After a crash an adoption applies the limit.
func (w *Operation) Checkpoint(ctx context.Context, runtime *oci.Runtime, dir string, o oci.CheckpointOptions) (memimage.Image, error) {
	if err := w.Row.Plan.Limits.RaiseCPU(w.host.Cgroup(w.ID())); err != nil {
		return memimage.Image{}, errs.Retryable(err)
	}
	img, err := runtime.Checkpoint(ctx, w.ID(), dir, o)
	if errors.Is(err, ErrCrash) {
		return img, err
	}
	return img, errors.Join(err, w.LimitCPU(ctx))
}

// RemoveMemory removes the stored memory; a missing one is no error.
func (w *Operation) RemoveMemory(context.Context) error {
	return memimage.Remove(w.host.MemoryDir(w.ID()))
}

// flush makes the sandbox's writes to its copy of the image and its volumes durable: its memory must not be
// newer than its files.
func (w *Operation) flush(ctx context.Context) error {
	var err error
	if w.rootfs, err = w.host.cfg.Containerd.Snapshot(ctx, w.ID()); err != nil {
		return err
	}
	if err := w.host.Disks(w.Row).Sync(); err != nil {
		return errs.Retryable(err)
	}
	if w.Row.Memory != nil {
		if w.Row.Memory.Disk, err = w.host.DiskUsed(ctx, w.Row); err != nil {
			return err
		}
	}
	dirs := []string{w.host.cfg.DataDir}
	if upper, ok := w.rootfs.UpperDir(); ok {
		dirs = append(dirs, upper)
	}
	for _, dir := range dirs {
		if err := durable.SyncFilesystem(dir); err != nil {
			return errs.Retryable(err)
		}
	}
	return nil
}

// BringUp does the steps from the stored data to a responding agent.
func (w *Operation) BringUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, DiskTimeout)
	defer cancel()
	if w.Row.Kept == agents.SuspendDelete {
		return w.fromClaims(ctx)
	}
	from := w.restartFromFiles
	if w.Row.KeepsMemory() {
		from = w.restore
	}
	if w.moved = !w.Row.Address.IsValid(); !w.moved {
		return from(ctx)
	}
	if err := w.doOne(ctx, step{name: "address", do: w.reserveAnother}); err != nil {
		return err
	}
	if err := from(ctx); err != nil {
		return err
	}
	return w.doOne(ctx, step{name: "hold", do: w.holdAddress})
}

// CheckMemory refuses an invalid restore before any change. What only an operator can fix is an
// errs.ErrConflict: the sandbox is not lost.
func (w *Operation) CheckMemory(ctx context.Context) error {
	img, err := memimage.Read(w.host.MemoryDir(w.ID()))
	if err != nil {
		return damaged(err)
	}
	runtime, err := w.host.cfg.Runtimes.ForBuild(img.Build)
	if err != nil {
		return OrFiles(fmt.Errorf("its memory on disk cannot be used: %w", err))
	}
	build, err := runtime.Build(ctx)
	if err != nil {
		return errs.Retryable(err)
	}
	return OrFiles(build.Restores(img.Build))
}

// damaged is the error for damaged memory on disk, which no request has caused.
func damaged(err error) error {
	if errs.Kind(err) == nil || errors.Is(err, errs.ErrUnavailable) {
		return errs.Retryable(err)
	}
	if errors.Is(err, errs.ErrConflict) {
		return OrFiles(err)
	}
	return OrFiles(fmt.Errorf("its memory on disk is damaged: %s: %w", errs.Text(err), errs.ErrConflict))
}

func (w *Operation) verify(ctx context.Context) error {
	if err := memimage.Verify(ctx, w.host.MemoryDir(w.ID())); err != nil {
		if ctx.Err() != nil {
			return errs.Retryable(err)
		}
		return damaged(err)
	}
	return nil
}

// restore does the steps from memory on disk to a responding agent. The bundle is the original one: its
// specification must be the checkpointed one.
//
// It starts nothing before all of the memory is verified.
func (w *Operation) restore(ctx context.Context) error {
	defer w.closeConsole()
	group, together := errgroup.WithContext(ctx)
	remount := func(ctx context.Context) error {
		return errors.Join(w.remount(ctx), w.eachSidecar(ctx, (*Operation).remount))
	}
	for _, s := range []step{{name: "verify", do: w.verify}, {name: "network", do: w.attach}, {name: "mount", do: remount}, {name: "projected", do: w.refillProjected}} {
		group.Go(func() error { return w.doOne(together, s) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return w.doAll(ctx, []step{{name: "tell", do: w.writeNewAddress}, {name: "restore", do: w.load}, {name: "agent", do: w.awaitRestored}, {name: "limit", do: w.LimitCPU}})
}

func (w *Operation) closeConsole() {
	if w.console != nil {
		_ = w.console.Close()
	}
}

func (w *Operation) remount(ctx context.Context) (err error) {
	if w.rootfs, err = w.host.cfg.Containerd.Snapshot(ctx, w.snapshotKey()); err != nil {
		return err
	}
	return w.mount(ctx)
}

func (w *Operation) load(ctx context.Context) error {
	runtime, err := w.host.cfg.Runtimes.ForBuild(w.Row.Memory.Build)
	if err != nil {
		return OrFiles(err)
	}
	w.Row.Build = w.Row.Memory.Build.SHA256
	return damaged(w.restoreContainers(ctx, runtime, w.host.MemoryDir(w.ID())))
}

// restoreContainers restores all containers from an image of their memory. With the last one their processes run.
func (w *Operation) restoreContainers(ctx context.Context, runtime *oci.Runtime, image string) (err error) {
	if w.console, err = oci.NewConsole(); err != nil {
		return errs.Retryable(err)
	}
	pid, err := runtime.Restore(ctx, w.ID(), w.host.Dir(w.ID()), image, w.console, oci.RestoreOptions{Background: true})
	if err != nil {
		return err
	}
	if w.Row.Process, err = lifecycle.ProcessOf(pid); err != nil {
		return errs.Retryable(fmt.Errorf("container exited at once: %w: %s", err, w.console.Text()))
	}
	w.Row.StartedAt = time.Now()
	return w.eachSidecar(ctx, func(one *Operation, ctx context.Context) (err error) {
		if one.console, err = oci.NewConsole(); err != nil {
			return errs.Retryable(err)
		}
		return runtime.RestoreJoined(ctx, one.containerID(), one.Path(""), image, one.console)
	})
}

// DiskTimeout bounds writing or restoring one memory: runtimes may hang, disks be slow.
const DiskTimeout = 10 * time.Minute
