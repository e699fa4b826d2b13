package suspend

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

const (
	// undoTimeout bounds the undo of a failed step, after its request has ended.
	undoTimeout = time.Minute
	// maxConcurrentStores bounds the memories that are moved to disk at the same time.
	maxConcurrentStores = 4
	// minStorePause and maxStorePause bound the pauses between two attempts to move a memory; each is four times the one
	// before. Attempts do not end: otherwise the memory would use RAM until the sandbox is resumed.
	minStorePause = time.Second
	maxStorePause = 5 * time.Minute
	// lookEvery is the time between two looks whether memory is low.
	lookEvery = time.Second
)

// storeLater moves the memory of a frozen sandbox to disk in the background, Config.StoreAfter after the pause, or once memory is low.
// It retries until the memory is there or the sandbox is no longer paused.
func (p *Suspender) storeLater(u *registry.Handle, r *journal.Row) {
	after, since := p.StoreAfter, r.PausedAt
	if after <= 0 || r.Plan.Class != oci.GVisor {
		return
	}
	stop := make(chan struct{})
	u.SetStore(sync.OnceFunc(func() { close(stop) }))
	p.cfg.Later(func(ctx context.Context) {
		wait, pause := min(time.Until(since.Add(after)), after), minStorePause
		for low := p.cfg.MemoryLow; ; low = nil {
			if !await(ctx, stop, wait, low) {
				return
			}
			if p.storeNow(ctx, u, since) {
				return
			}
			wait, pause = pause, min(4*pause, maxStorePause)
		}
	})
}

// await waits for a time, or until low reports true if it is not nil. It reports false if ctx or stop ended first.
func await(ctx context.Context, stop <-chan struct{}, wait time.Duration, low func() bool) bool {
	for end := time.Now().Add(wait); ; {
		left := time.Until(end)
		if left <= 0 || low != nil && low() {
			return ctx.Err() == nil
		}
		if low != nil {
			left = min(left, lookEvery)
		}
		select {
		case <-stop:
			return false
		case <-ctx.Done():
			return false
		case <-time.After(left):
		}
	}
}

// storeNow moves the memory of a sandbox that has been frozen since a time to disk, and reports whether nothing is left to
// do. It takes the lock of the sandbox.
func (p *Suspender) storeNow(ctx context.Context, u *registry.Handle, since time.Time) (finished bool) {
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		return true
	}
	defer func() { <-p.slots }()
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
	w := p.cfg.Host.Operation(new(*r))
	err = p.storeMemory(ctx, w, u)
	switch {
	case errors.Is(err, operation.ErrCrash):
		return true
	case err != nil:
		p.cfg.Log.WarnContext(ctx, "memory of a sandbox not moved to disk", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		if u.Row().Stage == journal.Paused {
			u.Update(func(o *sandbox.Observed) {
				o.Message = inMemory + "; it could not be written to disk: " + errs.Text(err)
			})
			p.cfg.Changes.Mark(u.Ref)
		}
		return ctx.Err() != nil // stopped, or interrupted by a removal
	}
	p.cfg.ObserveStep(string(r.Plan.Class), "store", time.Since(began))
	p.cfg.Log.InfoContext(ctx, "memory of a sandbox moved to disk", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		"bytes", w.Row.Memory.Size, telemetry.Duration, time.Since(began))
	return true
}

// storeMemory moves the memory of a frozen sandbox to disk. A failure before the write to the journal is undone, and the
// sandbox stays frozen. From that write on, the memory on disk is the sandbox's, and the container is garbage.
func (p *Suspender) storeMemory(ctx context.Context, w *operation.Operation, u *registry.Handle) error {
	if w.Row.Stage == journal.Paused {
		limited, cancel := context.WithTimeout(ctx, operation.DiskTimeout)
		defer cancel()
		if err := p.save(limited, w, u); err != nil {
			if errors.Is(err, operation.ErrCrash) {
				return err
			}
			return errors.Join(err, w.RemoveMemory(context.WithoutCancel(ctx)))
		}
		u.Update(func(o *sandbox.Observed) { setKept(o, w.Row) })
		u.Finished(w.Status(agents.OperationStore))
		p.cfg.Changes.Mark(u.Ref)
		if err := w.After("keep"); err != nil {
			return err
		}
	}
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return p.Release(whole, w, u)
}

// save writes memory and files to disk, and then the journal.
func (p *Suspender) save(ctx context.Context, w *operation.Operation, u *registry.Handle) error {
	if err := w.SaveMemory(ctx); err != nil {
		return err
	}
	w.Row.Memory.Exit = u.Observed().EntrypointExit
	changed := *w.Row
	changed.Process = lifecycle.Process{} // the watch must not report the end of the container
	if err := p.note(w, u, &changed, journal.Storing); err != nil {
		w.Row.Memory = nil
		return err
	}
	u.SetWatch(nil)
	w.Row.Stage = journal.Storing
	return nil
}

// Release removes from the host what a sandbox on disk does not need, and writes that to the journal. It keeps the address
// unless Config.ReleaseAddresses is set. It may be repeated.
func (p *Suspender) Release(ctx context.Context, w *operation.Operation, u *registry.Handle) error {
	noted := u.Row()
	if err := w.Release(ctx, noted != nil && noted.Address.IsValid()); err != nil {
		return err
	}
	if err := p.cfg.Registry.Note(u, w.Row, journal.Stored); err != nil {
		return err
	}
	p.setStored(u, w.Row)
	if err := w.After("stored"); err != nil {
		return err
	}
	return w.ReleaseLease(ctx)
}

// Messages about paused sandboxes.
const (
	inMemory       = "it is frozen; its memory is in RAM"
	FilesKept      = "its files are kept; its processes ended"
	runcKeepsFiles = FilesKept + ": class runc keeps files only"
	ClaimsKept     = "its volumes are kept; all else of it is gone"
	probesNotAgain = "its probes have not succeeded since it was resumed"
)

// setKept shows what a paused sandbox keeps.
func setKept(o *sandbox.Observed, r *journal.Row) {
	o.Memory, o.MemorySize, o.Message = r.Place(), 0, whereOf(r)
	if o.Memory == agents.MemoryOnDisk {
		o.MemorySize = r.Memory.Size
	}
}

// whereOf describes what a paused sandbox keeps, and where its memory is.
func whereOf(r *journal.Row) string {
	switch {
	case r.OnDisk() && r.Memory != nil:
		return fmt.Sprintf("its memory is on disk: %.1f MiB, written at %s", float64(r.Memory.Size)/(1<<20), r.Memory.Created.UTC().Format(time.RFC3339))
	case r.OnDisk() && r.Kept == agents.SuspendDelete:
		return ClaimsKept
	case r.OnDisk() && r.Kept == agents.SuspendFiles && r.Plan.Class == oci.Runc:
		return runcKeepsFiles
	case r.OnDisk() && r.Kept == agents.SuspendFiles:
		return FilesKept
	default:
		return inMemory
	}
}

// RemoveOrphans removes memory images of running or unknown sandboxes, and parts that an interruption left. It keeps those of
// the sandboxes in keep. Nothing may write there meanwhile. It needs no lock.
func (p *Suspender) RemoveOrphans(ctx context.Context, keep map[string]bool) error {
	var failures []error
	for _, dir := range p.cfg.MemoryDirs() {
		failures = append(failures, memimage.Sweep(dir))
		names, err := memimage.List(dir)
		failures = append(failures, err)
		for _, id := range names {
			if !keep[id] {
				p.cfg.Log.InfoContext(ctx, "orphaned memory image removed", "id", id)
				failures = append(failures, memimage.Remove(filepath.Join(dir, id)))
			}
		}
	}
	return errors.Join(failures...)
}
