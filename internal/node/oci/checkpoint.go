package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	runc "github.com/containerd/go-runc"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// undoTimeout bounds the cleanup after a failure.
const undoTimeout = 30 * time.Second

// CheckpointOptions configure a checkpoint. The zero value pauses and does not compress.
type CheckpointOptions struct {
	// LeaveRunning lets a running container continue as soon as its memory is written and Written
	// has returned, before the image is durable. Without it the container stays paused at the
	// image's state, for Remove or Resume. A container that was already paused stays paused.
	LeaveRunning bool
	// Written, unless nil, is called while the container is stopped at the image's state and its
	// files are flushed, so that the caller can copy them. The image is not durable yet and, for a
	// container left running, not complete. An error fails the checkpoint, and the container
	// returns to its previous state. If this process exits meanwhile, a container to be left
	// running continues, except in some cases in which it stays paused with that status.
	Written func(ctx context.Context) error
	// Digest computes Image.Digest, which costs a pass of SHA-256 over the image.
	Digest      bool
	Compression memimage.Compression
	// ExcludeCommittedZeroPages omits pages of zeros: a smaller image for programs that clear
	// unused memory, a slower one for others.
	ExcludeCommittedZeroPages bool
	// Direct writes pages around the page cache. It excludes compression.
	Direct bool
}

func (o CheckpointOptions) args() []string {
	// Without it runsc ends a sandbox even if it could not save it.
	args := []string{"--leave-running"}
	if o.Compression != memimage.NoCompression {
		args = append(args, "--compression="+string(o.Compression))
	}
	if o.ExcludeCommittedZeroPages {
		args = append(args, "--exclude-committed-zero-pages")
	}
	if o.Direct {
		args = append(args, "--direct")
	}
	return args
}

func (o CheckpointOptions) check() error {
	switch {
	case o.Compression != memimage.NoCompression && o.Compression != memimage.Flate:
		return fmt.Errorf("compression %q: want none or %q: %w", o.Compression, memimage.Flate, errs.ErrInvalid)
	case o.Compression != memimage.NoCompression && o.Direct:
		return fmt.Errorf("compression with direct writes is not supported: %w", errs.ErrInvalid)
	}
	return nil
}

// Checkpoint writes the memory of a running or paused container to a new directory whose parent
// exists. The directory appears complete and durable, or not at all: it is written under another
// name, synced and renamed; [memimage.Sweep] removes leftovers of a crash. After an error the
// container returns to its previous state.
//
// The image has processes, their memory, memory filesystems, sockets, clocks and the spec, and no
// files of the root filesystem or of volumes. Those are flushed to the host before it returns, so
// that a copy taken while the container is still paused matches the memory. The image includes
// deleted but open files; an open, deleted named pipe makes checkpoints fail. A process started by
// the runtime's exec ends with a restore; children of the first process survive.
//
// Network connections stay open in a container left running. In restored ones they are closed;
// their peers notice when they send to an address that has an owner again. A container of the class
// [Runc] is an errs.ErrInvalid.
func (r *Runtime) Checkpoint(ctx context.Context, id, dir string, o CheckpointOptions) (img memimage.Image, err error) {
	action := "checkpoint container " + id
	if err := errors.Join(r.checkClass(), o.check()); err != nil {
		return memimage.Image{}, fmt.Errorf("%s: %w", action, err)
	}
	build, err := r.Build(ctx)
	if err != nil {
		return memimage.Image{}, fmt.Errorf("%s: %w", action, err)
	}
	part, err := memimage.Begin(dir)
	if err != nil {
		return memimage.Image{}, fmt.Errorf("%s: %w", action, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(part))
		}
	}()
	status, err := r.saveable(ctx, id)
	if err != nil {
		return memimage.Image{}, fmt.Errorf("%s: %w", action, err)
	}
	img = memimage.Image{Build: build, Compression: o.Compression, Created: time.Now().UTC()}
	held := new(pauseGuard)
	defer func() {
		if err != nil {
			err = errors.Join(err, held.end())
		}
	}()
	err = errNotLive
	if status == Running && o.live() {
		img.Paused, err = r.saveLive(ctx, id, part, o.Direct, o.Written)
	}
	if errors.Is(err, errNotLive) {
		img.Paused, err = r.savePaused(ctx, id, part, o, status, held)
	}
	if err != nil {
		return memimage.Image{}, fmt.Errorf("%s: %w", action, err)
	}
	if err := memimage.Seal(ctx, &img, part, dir, o.Digest); err != nil {
		return memimage.Image{}, fmt.Errorf("%s: %w", action, err)
	}
	return img, nil
}

// live reports whether saveLive can, and should, save a running container.
func (o CheckpointOptions) live() bool {
	return o.LeaveRunning && o.Written != nil && o.Compression == memimage.NoCompression && !o.ExcludeCommittedZeroPages
}

// savePaused makes runsc write the image, and pauses the container if needed. On a later failure
// the caller must end held.
func (r *Runtime) savePaused(ctx context.Context, id, part string, o CheckpointOptions, status Status, held *pauseGuard) (paused time.Duration, err error) {
	if err := emptyDir(part); err != nil { // leftovers of a live save
		return 0, err
	}
	if status == Running && (!o.LeaveRunning || o.Written != nil) {
		if err := r.hold(ctx, id, held); err != nil {
			return 0, err
		}
	}
	if err := r.save(ctx, id, part, o); err != nil {
		return 0, err
	}
	if o.Written != nil {
		if err := o.Written(ctx); err != nil {
			return 0, err
		}
	}
	if !o.LeaveRunning {
		return 0, nil
	}
	err = held.end()
	return held.paused, err
}

func emptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.Remove(filepath.Join(dir, e.Name())))
	}
	return err
}

// checkClass refuses classes without memory images.
func (r *Runtime) checkClass() error {
	if r.cfg.Class != GVisor {
		return fmt.Errorf("memory of sandboxes of class %s cannot be kept, only of class %s: %w", r.cfg.Class, GVisor, errs.ErrInvalid)
	}
	return nil
}

// pauseGuard is a container that a checkpoint keeps paused.
type pauseGuard struct {
	resume func() error // nil if it was paused before
	began  time.Time
	paused time.Duration // set by end
}

// end resumes the container, once; after an error it may be retried.
func (h *pauseGuard) end() error {
	if h.resume == nil {
		return nil
	}
	if err := h.resume(); err != nil {
		return err
	}
	h.resume, h.paused = nil, time.Since(h.began)
	return nil
}

func (r *Runtime) hold(ctx context.Context, id string, h *pauseGuard) error {
	h.began = time.Now()
	if err := r.Pause(ctx, id); err != nil {
		return errors.Join(err, r.resumeIfPaused(ctx, id))
	}
	h.resume = func() error { return r.Resume(ctx, id) }
	return nil
}

// saveable returns the status of a container that runs or is paused, and an error for others.
func (r *Runtime) saveable(ctx context.Context, id string) (Status, error) {
	status, err := r.State(ctx, id)
	switch {
	case err != nil:
		return "", err
	case status == Absent:
		return "", fmt.Errorf("not known to the runtime: %w", errs.ErrNotFound)
	case status != Running && status != Paused:
		return "", fmt.Errorf("container is %s: %w", status, errs.ErrConflict)
	}
	return status, nil
}

// resumeIfPaused is for pauses with an unknown result.
func (r *Runtime) resumeIfPaused(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if status, err := r.State(ctx, id); err != nil || status != Paused {
		return err
	}
	return r.Resume(ctx, id)
}

// save makes runsc write the image, and removes its log: images are the same for all.
func (r *Runtime) save(ctx context.Context, id, part string, o CheckpointOptions) error {
	extra := func(args []string) []string { return append(args, o.args()...) }
	err := r.cli(part).Checkpoint(ctx, id, &runc.CheckpointOpts{ImagePath: part}, extra)
	if err != nil {
		// The rest repeats the log and has stacks of its kernel.
		first, _, _ := strings.Cut(err.Error(), "\n")
		if logged := loggedError(part); logged != "" {
			first = logged
		}
		return errors.Join(context.Cause(ctx), errors.New(shorten(first)))
	}
	if err := os.Remove(filepath.Join(part, runtimeLog)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove log: %w", err)
	}
	return nil
}

// RestoreOptions configure a restore. The zero value reads all pages before any process runs.
type RestoreOptions struct {
	// Background starts the processes when all but the pages is read; access to a missing page
	// blocks. If the image is then unreadable, the container ends. The image may be removed at
	// once. A compressed image is an errs.ErrInvalid.
	Background bool
	// Direct reads pages around the page cache: for an image that is read once.
	Direct bool
}

func (o RestoreOptions) args() (args []string) {
	if o.Background {
		args = append(args, "--background")
	}
	if o.Direct {
		args = append(args, "--direct")
	}
	return args
}

// Restore creates a container from its bundle and an image, and returns what Run returns. The image
// is only read: any number of containers may be restored from it, also concurrently. An image of
// another build, or of a processor with features that this one lacks, is an errs.ErrConflict; a
// broken one an errs.ErrInvalid; an ID in use an errs.ErrConflict. After an error nothing runs and
// nothing of the container remains.
//
// The bundle's spec must equal the checkpointed one in: version, arguments, working directory,
// user, terminal, rlimits, capabilities, no-new-privileges, read-only root, the destinations, types
// and options of the mounts (so the sizes of memory volumes too), the kinds of namespaces, sysctls,
// devices, and annotations with the prefix dev.gvisor. It may differ in: the container's ID,
// bundle, root path, sources of mounts, hostname (the processes see the new one), environment (they
// keep the old one), cgroup path, limits, the network namespace's path with its addresses and
// routes (they see the new ones), and all other annotations. The files at the root path and in the
// mounts must be those of the moment of the checkpoint: an open file must exist under the same
// path.
//
// A network namespace serves one start: runsc removes its addresses, so that it needs them again
// before the next try, also after a failure.
//
// Sandboxes restored from one image have the same memory, including identifiers and the state of
// random generators in their programs. The kernel's random numbers differ, and so does the boot ID
// if the bundle is written by Spec. Clocks, also the monotonic one, have advanced as if the sandbox
// had run, so that timers that expired meanwhile fire at once.
func (r *Runtime) Restore(ctx context.Context, id, bundle, image string, console *Console, o RestoreOptions) (pid int, err error) {
	action := "restore container " + id
	if err := r.checkRestore(ctx, id, image, o); err != nil {
		return 0, fmt.Errorf("%s: %w", action, err)
	}
	if err := os.MkdirAll(r.cfg.Root, 0o700); err != nil {
		return 0, fmt.Errorf("%s: %w", action, err)
	}
	if err := os.Remove(filepath.Join(bundle, runtimeLog)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("%s: %w", action, err)
	}
	if err := renewBootID(bundle); err != nil {
		return 0, fmt.Errorf("%s: %w", action, err)
	}
	pidFile := filepath.Join(bundle, "pid")
	cgroups.WithQuickMoves(func() {
		_, err = r.cli(bundle).Restore(ctx, id, bundle, &runc.RestoreOpts{
			CheckpointOpts: runc.CheckpointOpts{ImagePath: image}, IO: console, PidFile: pidFile, Detach: true, ExtraArgs: o.args(),
		})
	})
	if err != nil {
		err = cause(bundle, console.Text(), err)
	} else {
		pid, err = runc.ReadPidFile(pidFile)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", action, errors.Join(err, r.undoRestore(ctx, id, bundle)))
	}
	return pid, nil
}

// RestoreJoined creates another container of a sandbox that Restore has begun. The sandbox's processes run when its last
// container is created.
func (r *Runtime) RestoreJoined(ctx context.Context, id, bundle, image string, console *Console) error {
	if err := renewBootID(bundle); err != nil {
		return fmt.Errorf("restore container %s: %w", id, err)
	}
	_, err := r.cli(bundle).Restore(ctx, id, bundle, &runc.RestoreOpts{
		CheckpointOpts: runc.CheckpointOpts{ImagePath: image}, IO: console, PidFile: filepath.Join(bundle, "pid"), Detach: true,
	})
	if err != nil {
		return fmt.Errorf("restore container %s: %w", id, cause(bundle, console.Text(), err))
	}
	return nil
}

func (r *Runtime) checkRestore(ctx context.Context, id, dir string, o RestoreOptions) error {
	if err := r.checkClass(); err != nil {
		return err
	}
	if !r.hasNoState(id) {
		return fmt.Errorf("the container exists: %w", errs.ErrConflict)
	}
	img, err := memimage.Read(dir)
	if err != nil {
		return err
	}
	if o.Background && img.Compression != memimage.NoCompression {
		return fmt.Errorf("compression with background reads is not supported: %w", errs.ErrInvalid)
	}
	build, err := r.Build(ctx)
	if err != nil {
		return err
	}
	return build.Restores(img.Build)
}

// undoRestore removes leftovers of an interrupted or failed restore.
func (r *Runtime) undoRestore(ctx context.Context, id, bundle string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	b, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return fmt.Errorf("find cgroups: %w", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(b, &spec); err != nil || spec.Linux == nil || spec.Linux.CgroupsPath == "" {
		return nil // unreadable for the runtime too, which has started nothing
	}
	return r.Remove(ctx, id, spec.Linux.CgroupsPath)
}

// detachedCLI is the command line for commands that must complete: they outlive this process.
func (r *Runtime) detachedCLI() *runc.Runc {
	c := r.cli("")
	c.PdeathSignal = syscall.Signal(0)
	return c
}
