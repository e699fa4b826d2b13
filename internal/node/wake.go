package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/internal/errs"
	"github.com/barchan-dev/barchan/internal/lifecycle"
	"github.com/barchan-dev/barchan/internal/oci"
	"github.com/barchan-dev/barchan/internal/sandbox"
	"github.com/barchan-dev/barchan/internal/telemetry"
)

// wake brings a sandbox back whose memory is on disk, in its turn. After a failure it sleeps
// as before, with its memory on disk, and the next try may succeed.
//
// What its processes wrote to files between the start of a try and its failure stays written,
// and their memory knows nothing of it. So a try goes on if the one who asked for it does not
// wait any more; only the removal of the sandbox interrupts it.
func (n *Node) wake(ctx context.Context, u *unit, r *row) error {
	began := time.Now()
	ctx, done := u.unlessInterrupted(ctx)
	defer done()
	w := &work{n: n, row: new(row)}
	*w.row = *r
	if err := w.checkMemory(ctx); err != nil {
		return err
	}
	if r.Stage != stored { // something of a container may be there
		if err := w.rest(ctx, u); err != nil {
			return err
		}
	}
	err := n.note(u, w.row, waking)
	if err == nil {
		err = w.restore(ctx)
	}
	awake := *w.row
	awake.Memory, awake.PausedAt = nil, time.Time{}
	if err == nil {
		err = n.note(u, &awake, live)
	}
	if err == nil {
		err = w.after("awake")
	}
	switch {
	case errors.Is(err, ErrCrash):
		return err
	case err != nil:
		return n.asleepAgain(ctx, u, w, err)
	}
	n.cameToLife(u, &awake)
	n.forgetMemory(u)
	n.observeStep(awake.Plan.Class, "wake", time.Since(began))
	n.log.InfoContext(ctx, "sandbox resumed from disk", telemetry.Namespace, u.ref.Namespace, telemetry.Sandbox, u.ref.Name, telemetry.Took, time.Since(began))
	return nil
}

// forgetMemory has Run remove the image of a sandbox that was resumed from it, for which nobody
// has to wait. If that is not done, the next checkpoint, the removal or the next start does it.
func (n *Node) forgetMemory(u *unit) {
	n.tasks.start(func(ctx context.Context) {
		ctx, done, err := u.take(ctx)
		if err != nil {
			return
		}
		defer done()
		if r := u.current(); u.buried() || r == nil || r.onDisk() {
			return // removed, or asleep again
		}
		if err := oci.RemoveImage(n.memoryDir(string(u.id))); err != nil {
			n.log.WarnContext(ctx, "memory of a sandbox that was resumed is left on disk", telemetry.Sandbox, u.ref.Name, telemetry.Error, err)
		}
	})
}

// asleepAgain takes back what a failed try to wake a sandbox has done.
func (n *Node) asleepAgain(ctx context.Context, u *unit, w *work, cause error) error {
	if ctx.Err() != nil {
		cause = fmt.Errorf("%w: %w", cause, errs.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return errors.Join(fmt.Errorf("resume from disk: %w", unavailable(cause)), w.rest(ctx, u))
}

// checkMemory finds what would fail before anything is touched. What only the machine's owner
// can mend is an errs.ErrConflict: the sandbox is not lost by it.
func (w *work) checkMemory(ctx context.Context) error {
	runtime, err := w.n.runtimeOf(w.row.Plan.Class)
	if err != nil {
		return err
	}
	img, err := oci.ReadImage(w.n.memoryDir(w.id()))
	if errs.Kind(err) != nil {
		return fmt.Errorf("its memory on disk is damaged: %v: %w", err, errs.ErrConflict) //nolint:errorlint // its kind would be the caller's fault
	} else if err != nil {
		return unavailable(err)
	}
	build, err := runtime.Build(ctx)
	if err != nil {
		return unavailable(err)
	}
	if err := build.Restores(img.Build); err != nil {
		return fmt.Errorf("it stays asleep until the server runs with what its memory needs: %w", err)
	}
	return nil
}

// restore does the steps from disk to an agent that answers. The bundle is the one that the
// sandbox was started from: its specification must be the checkpointed one.
func (w *work) restore(ctx context.Context) error {
	defer func() {
		if w.console != nil {
			_ = w.console.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, diskTimeout)
	defer cancel()
	for _, s := range []step{
		{name: "network", do: w.attach}, {name: "mount", do: w.mountAgain}, {name: "restore", do: w.load}, {name: "agent", do: w.awaitAgent},
	} {
		if err := w.doOne(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (w *work) mountAgain(ctx context.Context) (err error) {
	if w.rootfs, err = w.n.cfg.Containerd.Snapshot(ctx, w.id()); err != nil {
		return err
	}
	return w.mount(ctx)
}

// load starts the container from its memory on disk.
func (w *work) load(ctx context.Context) (err error) {
	runtime, err := w.n.runtimeOf(w.row.Plan.Class)
	if err != nil {
		return err
	}
	if w.console, err = oci.NewConsole(); err != nil {
		return unavailable(err)
	}
	pid, err := runtime.Restore(ctx, w.id(), w.n.dir(w.id()), w.n.memoryDir(w.id()), w.console, oci.RestoreOptions{Background: true})
	if errors.Is(err, errs.ErrInvalid) {
		return fmt.Errorf("its memory on disk is damaged: %v: %w", err, errs.ErrConflict) //nolint:errorlint // its kind would be the caller's fault
	} else if err != nil {
		return unavailable(err)
	}
	if w.row.Process, err = lifecycle.ProcessOf(pid); err != nil {
		return unavailable(fmt.Errorf("it ended at once: %w: %s", err, w.console.Text()))
	}
	w.row.StartedAt = time.Now()
	return nil
}

// takeOverStored makes a sandbox of the journal whose memory is on disk this node's own. One at
// rest is not touched.
func (n *Node) takeOverStored(ctx context.Context, u *unit, r *row) {
	u.see(func(o *sandbox.Observed) {
		o.State, o.Message = sandbox.ContainerPaused, r.where()
		if r.Memory != nil {
			o.EntrypointExit = r.Memory.Exit
		}
	})
	if r.Stage != stored {
		n.layToRest(ctx, u)
	}
}

// layToRest removes what an interruption left of the container of a sandbox whose memory is on
// disk. Failing is no reason for anything else to fail: the sweep and the next Resume try again.
func (n *Node) layToRest(ctx context.Context, u *unit) {
	ctx, done, err := u.take(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.current()
	if u.buried() || r == nil || !r.onDisk() || r.Stage == stored {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	w := &work{n: n, row: new(row)}
	*w.row = *r
	if err := w.rest(ctx, u); err != nil {
		n.log.WarnContext(ctx, "rest of a sandbox whose memory is on disk is left on the machine", telemetry.Sandbox, u.ref.Name, telemetry.Error, err)
	}
}

// identify has the runtimes' builds known before the first sandbox needs one.
func (n *Node) identify(ctx context.Context) {
	if r := n.runtimes[oci.GVisor]; r != nil && n.cfg.StoreAfter > 0 {
		if _, err := r.Build(ctx); err != nil && ctx.Err() == nil {
			n.log.WarnContext(ctx, "build of the runtime not known", "class", oci.GVisor, telemetry.Error, err)
		}
	}
}
