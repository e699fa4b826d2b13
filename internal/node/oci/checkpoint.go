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

// undoTimeout bounds what sets things right after a failure.
const undoTimeout = 30 * time.Second

// CheckpointOptions say how a checkpoint is taken. The zero value pauses and does not compress.
type CheckpointOptions struct {
	// LeaveRunning lets a container that ran go on as soon as its memory is written and Written has
	// returned, before the image is on disk. Without it the container stays paused where the image
	// has it, for Remove or Resume to end that. One that was paused before stays so either way.
	LeaveRunning bool
	// Written, unless nil, is called while the container stands still where the image has it and its
	// files are flushed, so that they can be copied as they are at that moment. Nothing of the
	// image is durable then, and, of a container that is left running, not all written. Its
	// error fails the checkpoint, and the container does what it did before. If we end meanwhile, one that is to
	// be left running goes on by itself, but for some cases in which it is left paused and says so, as one that is not.
	Written func(ctx context.Context) error
	// Digest asks for Image.Digest, which costs a pass of SHA-256 over all that was written.
	Digest      bool
	Compression memimage.Compression
	// ExcludeCommittedZeroPages looks for pages of zeros and leaves them out: a smaller image
	// of programs that clear memory they do not use, a slower one of all others.
	ExcludeCommittedZeroPages bool
	// Direct writes pages around the page cache. It cannot be had with compression.
	Direct bool
}

func (o CheckpointOptions) args() []string {
	// runsc ends a sandbox that it does not leave running even if it could not save it.
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
		return fmt.Errorf("a compressed image cannot be written directly: %w", errs.ErrInvalid)
	}
	return nil
}

// Checkpoint writes the memory of a container, which runs or is paused, to a new directory
// whose parent exists. The directory is there whole and durable, or not at all: it is made
// under another name, synced and renamed; [memimage.Sweep] removes what an end of ours left of
// that. After an error the container does what it did before.
//
// The image has processes, their memory, memory filesystems, sockets, clocks and the spec, and
// no files of the root filesystem or of volumes: those are flushed to the host before it returns, so
// that a copy taken while the container is still paused fits the memory. Whatever they
// still lack of deleted but open files is in the image; an open named pipe that lost its name
// makes checkpoints fail while it is open. A process that was started by the
// runtime's exec ends with a restore; children of the first process live on.
//
// Connections over the network stay open in the container that runs on. In those restored from
// the image they have ended; their peers hear nothing until they send something to an
// address that has an owner again. A container of the class [Runc] is an errs.ErrInvalid.
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

// live reports whether a running container can be saved by saveLive, and is better so.
func (o CheckpointOptions) live() bool {
	return o.LeaveRunning && o.Written != nil && o.Compression == memimage.NoCompression && !o.ExcludeCommittedZeroPages
}

// savePaused has runsc write the image, of a container that is paused meanwhile if it has to be. What
// is in held is to be ended if what comes after it fails.
func (r *Runtime) savePaused(ctx context.Context, id, part string, o CheckpointOptions, status Status, held *pauseGuard) (paused time.Duration, err error) {
	if err := emptyDir(part); err != nil { // of what another way left
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

// checkClass refuses for classes that cannot.
func (r *Runtime) checkClass() error {
	if r.cfg.Class != GVisor {
		return fmt.Errorf("the memory of sandboxes of class %s cannot be kept, only that of class %s: %w", r.cfg.Class, GVisor, errs.ErrInvalid)
	}
	return nil
}

// pauseGuard is a container that a checkpoint keeps paused.
type pauseGuard struct {
	resume func() error // nil if it is not ours to resume
	began  time.Time
	paused time.Duration // known after the end
}

// end lets the container go on, once; after an error it may be tried again.
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

// hold pauses a running container.
func (r *Runtime) hold(ctx context.Context, id string, h *pauseGuard) error {
	h.began = time.Now()
	if err := r.Pause(ctx, id); err != nil {
		return errors.Join(err, r.resumeIfPaused(ctx, id))
	}
	h.resume = func() error { return r.Resume(ctx, id) }
	return nil
}

// saveable says whether a container runs or is paused; otherwise it cannot be saved.
func (r *Runtime) saveable(ctx context.Context, id string) (Status, error) {
	status, err := r.State(ctx, id)
	switch {
	case err != nil:
		return "", err
	case status == Absent:
		return "", fmt.Errorf("the runtime does not know it: %w", errs.ErrNotFound)
	case status != Running && status != Paused:
		return "", fmt.Errorf("it is %s: %w", status, errs.ErrConflict)
	}
	return status, nil
}

// resumeIfPaused is for when it is not known whether a pause came to its end.
func (r *Runtime) resumeIfPaused(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if status, err := r.State(ctx, id); err != nil || status != Paused {
		return err
	}
	return r.Resume(ctx, id)
}

// save has runsc write the image. Its log is removed, for images are the same for all.
func (r *Runtime) save(ctx context.Context, id, part string, o CheckpointOptions) error {
	extra := func(args []string) []string { return append(args, o.args()...) }
	err := r.cli(part).Checkpoint(ctx, id, &runc.CheckpointOpts{ImagePath: part}, extra)
	if err != nil {
		// What it printed has the log's words again, and stacks of its kernel.
		first, _, _ := strings.Cut(err.Error(), "\n")
		if said := loggedError(part); said != "" {
			first = said
		}
		return errors.Join(context.Cause(ctx), errors.New(shorten(first)))
	}
	if err := os.Remove(filepath.Join(part, runtimeLog)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove log: %w", err)
	}
	return nil
}

// RestoreOptions say how an image is read. The zero value reads all before anything runs.
type RestoreOptions struct {
	// Background starts the processes when all but the pages has been read; a page that is
	// not there yet is waited for. If the image turns out unreadable then, the container ends.
	// The image may be removed at once. A compressed image is an errs.ErrInvalid.
	Background bool
	// Direct reads pages around the page cache: for an image that is read once.
	Direct bool
	// Later, unless nil, has pages read in the Background with some of the processors only, so that the sandbox
	// answers before all of an image of 512 MiB or more is there; without it, and where Linux is older than 6.14, reading takes them all.
	// It is called at most once, with what goes on after Restore has returned, and is to have that called
	// soon, for pages are waited for; the end of its context has the rest read as fast as it can be.
	Later func(func(context.Context))
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

// Restore creates a container from its bundle and an image, and returns what Run returns. The
// image is only read: any number of containers may be restored from it, at the same time too.
// An image of another build, or of a processor that has what this one lacks, is an
// errs.ErrConflict; a broken one an errs.ErrInvalid; an ID that is in use an errs.ErrConflict.
// After an error nothing runs and nothing of the container is left.
//
// The bundle's spec must be the checkpointed one in: version, arguments, working directory,
// user, terminal, rlimits, capabilities, no-new-privileges, read-only root, the
// destinations, types and options of the mounts (so the sizes of memory volumes too), the kinds of
// namespaces, sysctls, devices, and annotations with the prefix dev.gvisor. It may differ in: the
// container's ID, bundle, root path, sources of mounts, hostname (the processes see the new
// one), environment (they keep the old one), cgroup path, limits, the network namespace's path with its
// addresses and routes (they see the new ones), and all other annotations. The files at the
// root path and in the mounts must be those of the moment of the checkpoint: a file that is
// open there must be found under the same path.
//
// A network namespace serves one start: runsc takes its addresses away, so that it must get
// them again before the next try, after a failure too.
//
// Sandboxes restored from one image are the same in all that they remember, identifiers and the
// state of random generators in their programs included; the kernel's random numbers differ,
// and so does the boot ID, if the bundle is of Spec's making. Clocks, the monotonic one too, are as far as if the sandbox had
// run all the time, so that timers which fell due meanwhile fire at once.
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
	err = restorePaced(ctx, filepath.Join(bundle, "image"), image, o, func(image string) (err error) {
		cgroups.WithQuickMoves(func() {
			_, err = r.cli(bundle).Restore(ctx, id, bundle, &runc.RestoreOpts{
				CheckpointOpts: runc.CheckpointOpts{ImagePath: image}, IO: console, PidFile: pidFile, Detach: true, ExtraArgs: o.args(),
			})
		})
		return err
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

// checkRestore finds what would fail before anything is touched.
func (r *Runtime) checkRestore(ctx context.Context, id, dir string, o RestoreOptions) error {
	if err := r.checkClass(); err != nil {
		return err
	}
	if !r.hasNoState(id) {
		return fmt.Errorf("the runtime has a container of this ID: %w", errs.ErrConflict)
	}
	img, err := memimage.Read(dir)
	if err != nil {
		return err
	}
	if o.Background && img.Compression != memimage.NoCompression {
		return fmt.Errorf("a compressed image cannot be read in the background: %w", errs.ErrInvalid)
	}
	build, err := r.Build(ctx)
	if err != nil {
		return err
	}
	return build.Restores(img.Build)
}

// undoRestore removes what an interrupted or failed restore left.
func (r *Runtime) undoRestore(ctx context.Context, id, bundle string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	b, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return fmt.Errorf("find cgroups: %w", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(b, &spec); err != nil || spec.Linux == nil || spec.Linux.CgroupsPath == "" {
		return nil // the runtime could not read it either, and has started nothing
	}
	return r.Remove(ctx, id, spec.Linux.CgroupsPath)
}

// detachedCLI is the command line for what must not be left half done: it goes on without us.
func (r *Runtime) detachedCLI() *runc.Runc {
	c := r.cli("")
	c.PdeathSignal = syscall.Signal(0)
	return c
}
