package node

import (
	"context"
	"errors"
	"fmt"
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

// How the memory of frozen sandboxes is moved to disk.
const (
	storesAtOnce = 4
	// firstStorePause is between two tries; each is four times the one before, and lastStorePause at
	// most. There is no last try: what stays in RAM holds it until it can go.
	firstStorePause = time.Second
	lastStorePause  = 5 * time.Minute
)

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
	w := n.host.Operation(new(*r))
	err = n.storeMemory(ctx, w, u)
	switch {
	case errors.Is(err, operation.ErrCrash):
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
		"bytes", w.Row.Memory.Size, telemetry.Duration, time.Since(began))
	return true
}

// store moves the memory of a frozen sandbox to disk. Up to the write of the journal, all is
// taken back on failure, and the sandbox is frozen as before. From then on the memory on disk
// is the sandbox's, and what is left of the container only waits to be removed.
func (n *Node) storeMemory(ctx context.Context, w *operation.Operation, u *registry.Handle) error {
	if w.Row.Stage == journal.Paused {
		limited, cancel := context.WithTimeout(ctx, operation.DiskTimeout)
		defer cancel()
		if err := n.save(limited, w, u); err != nil {
			if errors.Is(err, operation.ErrCrash) {
				return err
			}
			return errors.Join(err, w.RemoveMemory(context.WithoutCancel(ctx)))
		}
		u.Update(func(o *sandbox.Observed) { o.Memory, o.Message = w.Row.Place(), whereOf(w.Row) })
		n.dirty.Mark(u.Ref)
		if err := w.After("keep"); err != nil {
			return err
		}
	}
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return n.releaseResources(whole, w, u)
}

// save writes memory and files to disk, and notes that.
func (n *Node) save(ctx context.Context, w *operation.Operation, u *registry.Handle) error {
	if err := w.SaveMemory(ctx); err != nil {
		return err
	}
	w.Row.Memory.Exit = u.Observed().EntrypointExit
	changed := *w.Row
	changed.Process = lifecycle.Process{} // whoever watches it must not take what follows for its end
	if err := n.handles.Note(u, &changed, journal.Storing); err != nil {
		w.Row.Memory = nil
		return err
	}
	u.SetWatch(nil)
	w.Row.Stage = journal.Storing
	return nil
}

// releaseResources takes off the machine what a sandbox does not need or keep while it sleeps on disk, and
// notes that. What it keeps stays, and its address, unless that is given back. It may be repeated.
func (n *Node) releaseResources(ctx context.Context, w *operation.Operation, u *registry.Handle) error {
	noted := u.Row()
	if err := w.Release(ctx, noted != nil && noted.Address.IsValid()); err != nil {
		return err
	}
	if err := n.handles.Note(u, w.Row, journal.Stored); err != nil {
		return err
	}
	n.setStored(u, w.Row)
	if err := w.After("stored"); err != nil {
		return err
	}
	return w.ReleaseLease(ctx)
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
			failures = append(failures, memimage.Remove(n.host.MemoryDir(id)))
		}
	}
	return errors.Join(failures...)
}
