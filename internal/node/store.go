package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/node/oci/memimage"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// How the memory of frozen sandboxes is moved to disk.
const (
	storesAtOnce = 4
	// firstStorePause is between two tries; each is four times the one before, and lastStorePause at
	// most. There is no last try: what stays in RAM holds it until it can go.
	firstStorePause = time.Second
	lastStorePause  = 5 * time.Minute
	// diskTimeout bounds the way of one memory to disk or back: runtimes may hang, disks be slow.
	diskTimeout = 10 * time.Minute
)

func (n *Node) memoryDir(id string) string { return filepath.Join(n.cfg.MemoryDir, id) }

// storeLater has Run move the memory of a frozen sandbox to disk, once it has slept for
// Config.StoreAfter, and try until it is there or the sandbox does not sleep any more.
func (n *Node) storeLater(u *registry.Handle, r *journal.Row) {
	after, since := n.cfg.StoreAfter, r.PausedAt
	if after <= 0 || r.Plan.Class != oci.GVisor {
		return
	}
	stop := make(chan struct{})
	u.SetStore(sync.OnceFunc(func() { close(stop) }))
	n.tasks.Start(func(ctx context.Context) {
		wait, pause := min(time.Until(since.Add(after)), after), firstStorePause
		for {
			select {
			case <-stop:
				return
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
			if n.storeNow(ctx, u, since) {
				return
			}
			wait, pause = pause, min(4*pause, lastStorePause)
		}
	})
}

// storeNow moves the memory of a sandbox that has been frozen since then to disk, and reports
// whether there is no more to do.
func (n *Node) storeNow(ctx context.Context, u *registry.Handle, since time.Time) (finished bool) {
	select {
	case n.stores <- struct{}{}:
	case <-ctx.Done():
		return true
	}
	defer func() { <-n.stores }()
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return true
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || (r.Stage != journal.Paused && r.Stage != journal.Storing) || !r.PausedAt.Equal(since) {
		return true
	}
	began := time.Now()
	w := &operation{n: n, row: new(journal.Row)}
	*w.row = *r
	err = w.store(ctx, u)
	switch {
	case errors.Is(err, ErrCrash):
		return true
	case err != nil:
		n.log.WarnContext(ctx, "memory of a sandbox not moved to disk", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		if u.Row().Stage == journal.Paused {
			u.Update(func(o *sandbox.Observed) {
				o.Message = inMemory + "; it could not be written to disk: " + errs.Text(err)
			})
			n.dirty.Mark(u.Ref)
		}
		return ctx.Err() != nil // stopped, or somebody wants something else of it
	}
	n.observeStep(r.Plan.Class, "store", time.Since(began))
	n.log.InfoContext(ctx, "memory of a sandbox moved to disk", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		"bytes", w.row.Memory.Size, telemetry.Duration, time.Since(began))
	return true
}

// store moves the memory of a frozen sandbox to disk. Up to the write of the journal, all is
// taken back on failure, and the sandbox is frozen as before. From then on the memory on disk
// is the sandbox's, and what is left of the container only waits to be removed.
func (w *operation) store(ctx context.Context, u *registry.Handle) error {
	if w.row.Stage == journal.Paused {
		limited, cancel := context.WithTimeout(ctx, diskTimeout)
		defer cancel()
		if err := w.save(limited, u); err != nil {
			if errors.Is(err, ErrCrash) {
				return err
			}
			return errors.Join(err, w.removeMemory(context.WithoutCancel(ctx)))
		}
		u.Update(func(o *sandbox.Observed) { o.Memory, o.Message = w.row.Place(), whereOf(w.row) })
		w.n.dirty.Mark(u.Ref)
		if err := w.after("keep"); err != nil {
			return err
		}
	}
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return w.releaseResources(whole, u)
}

// save writes memory and files to disk, and notes that.
func (w *operation) save(ctx context.Context, u *registry.Handle) error {
	for _, s := range []step{{name: "checkpoint", do: w.checkpoint}, {name: "flush", do: w.flush}} {
		if err := w.doOne(ctx, s); err != nil {
			return err
		}
	}
	w.row.Memory.Exit = u.Observed().EntrypointExit
	changed := *w.row
	changed.Process = lifecycle.Process{} // whoever watches it must not take what follows for its end
	if err := w.n.handles.Note(u, &changed, journal.Storing); err != nil {
		w.row.Memory = nil
		return err
	}
	u.SetWatch(nil)
	w.row.Stage = journal.Storing
	return nil
}

func (w *operation) checkpoint(ctx context.Context) error {
	runtime, err := w.n.runtimes.Driving(w.row.Plan.Class, w.row.Build)
	if err != nil {
		return err
	}
	if err := w.removeMemory(ctx); err != nil { // of an earlier try
		return errs.Retryable(err)
	}
	if err := w.n.roomToStore(w.row); err != nil {
		return err
	}
	img, err := runtime.Checkpoint(ctx, w.id(), w.n.memoryDir(w.id()), oci.CheckpointOptions{})
	if err != nil {
		return errs.Retryable(err)
	}
	w.row.Memory = &journal.Memory{Build: img.Build, Size: img.Size(), Created: img.Created}
	return nil
}

func (w *operation) removeMemory(context.Context) error {
	return memimage.Remove(w.n.memoryDir(w.id()))
}

// flush makes durable what the sandbox wrote to its copy of the image and to its volumes, for
// its memory must not know more than its files do.
func (w *operation) flush(ctx context.Context) error {
	var err error
	if w.rootfs, err = w.n.cfg.Containerd.Snapshot(ctx, w.id()); err != nil {
		return err
	}
	if w.row.Memory != nil {
		if w.row.Memory.Disk, err = w.n.cfg.Containerd.SnapshotUsage(ctx, w.id()); err != nil {
			return err
		}
	}
	dirs := []string{w.n.cfg.DataDir}
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

// releaseResources takes off the machine what a sandbox does not need or keep while it sleeps on disk, and
// notes that. What it keeps stays, and its address, unless that is given back. It may be repeated.
func (w *operation) releaseResources(ctx context.Context, u *registry.Handle) error {
	for _, s := range []step{
		{name: "stop", do: w.stop},
		{name: "unmount", do: w.unmount},
		{name: "detach", do: w.disconnect},
		{name: "discard", do: func(ctx context.Context) error { return errors.Join(w.discard(ctx), w.clearAddress(ctx, u)) }},
	} {
		if err := w.doOne(ctx, s); err != nil {
			return errs.Retryable(err)
		}
	}
	w.row.Process = lifecycle.Process{}
	if !w.row.KeepsMemory() {
		w.row.Build = ""
	}
	if err := w.n.handles.Note(u, w.row, journal.Stored); err != nil {
		return err
	}
	w.n.setStored(u, w.row)
	if err := w.after("stored"); err != nil {
		return err
	}
	return w.releaseLease(ctx)
}

// What is said of a sandbox that sleeps.
const (
	inMemory       = "it is frozen; its memory is in RAM"
	filesKept      = "its files are kept; its processes ended"
	runcKeepsFiles = filesKept + ": class runc keeps files only"
	claimsKept     = "its volumes are kept; all else of it is gone"
	probesNotAgain = "its probes have not succeeded since it was resumed"
)

// whereOf describes what a paused sandbox keeps, and where its memory is.
func whereOf(r *journal.Row) string {
	switch {
	case r.OnDisk() && r.Memory != nil:
		return fmt.Sprintf("its memory is on disk: %.1f MiB, written at %s", float64(r.Memory.Size)/(1<<20), r.Memory.Created.UTC().Format(time.RFC3339))
	case r.OnDisk() && r.Kept == agents.SuspendDelete:
		return claimsKept
	case r.OnDisk() && r.Kept == agents.SuspendFiles && r.Plan.Class == oci.Runc:
		return runcKeepsFiles
	case r.OnDisk() && r.Kept == agents.SuspendFiles:
		return filesKept
	default:
		return inMemory
	}
}

// dropStrayMemory removes images of memory that do not count: those of sandboxes that run or
// are unknown, and what an interruption left. Those of the sandboxes in keep stay. Nothing may
// be writing there.
func (n *Node) dropStrayMemory(ctx context.Context, keep map[string]bool) error {
	failures := []error{memimage.Sweep(n.cfg.MemoryDir)}
	names, err := memimage.List(n.cfg.MemoryDir)
	failures = append(failures, err)
	for _, id := range names {
		if !keep[id] {
			n.log.InfoContext(ctx, "removing memory on disk that no sandbox waits for", "id", id)
			failures = append(failures, memimage.Remove(n.memoryDir(id)))
		}
	}
	return errors.Join(failures...)
}
