package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/barchan-dev/barchan/internal/node/oci/memimage"

	"golang.org/x/sync/errgroup"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// wake brings a sandbox back from what it keeps on disk, in its turn. After a failure it sleeps
// as before, and the next try may succeed. With filesOnly its memory is given up first, wherever
// that is; there is no way back from there.
//
// What its processes wrote to files between the start of a try and its failure stays written,
// and their memory knows nothing of it. So a try goes on if the one who asked for it does not
// wait any more; only the removal of the sandbox interrupts it.
func (n *Node) wake(ctx context.Context, u *registry.Handle, r *journal.Row, filesOnly bool) error {
	if err := n.refused(); err != nil {
		return err
	}
	began := time.Now()
	ctx, done := u.UnlessInterrupted(ctx)
	defer done()
	w := &operation{n: n, row: new(journal.Row)}
	*w.row = *r
	if err := w.selectRestoreSource(ctx, u, filesOnly); err != nil {
		return err
	}
	err := n.handles.Note(u, w.row, journal.Waking)
	if err == nil {
		err = w.bringUp(ctx)
	}
	awake := *w.row
	awake.Memory, awake.Kept, awake.PausedAt, awake.Ready = nil, "", time.Time{}, false
	if err == nil {
		err = n.handles.Note(u, &awake, journal.Live)
	}
	if err == nil {
		err = w.after("awake")
	}
	switch {
	case errors.Is(err, ErrCrash):
		return err
	case err != nil:
		return n.rollBackResume(ctx, u, w, err)
	}
	n.setRunning(u, &awake)
	if w.row.KeepsMemory() {
		n.forgetMemory(u)
	}
	n.observeStep(awake.Plan.Class, "wake", time.Since(began))
	n.log.InfoContext(ctx, "sandbox resumed from disk", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		"memory", w.row.KeepsMemory(), telemetry.Address, awake.Address, telemetry.Duration, time.Since(began))
	return nil
}

// selectRestoreSource decides what a sandbox comes back from, and sees to it that nothing else of it is
// left.
func (w *operation) selectRestoreSource(ctx context.Context, u *registry.Handle, filesOnly bool) error {
	if filesOnly && w.row.KeepsMemory() {
		if err := w.decide(u, agents.SuspendFiles); err != nil {
			return err
		}
		if err := w.after("decided"); err != nil {
			return err
		}
	}
	if w.row.KeepsMemory() {
		if err := w.checkMemory(ctx); err != nil {
			return err
		}
	}
	if w.row.Stage != journal.Stored { // something of a container may be there
		return w.releaseResources(ctx, u)
	}
	return nil
}

// bringUp does the steps from what a sandbox keeps to an agent that answers.
func (w *operation) bringUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, diskTimeout)
	defer cancel()
	if w.row.Kept == agents.SuspendDelete {
		return w.fromClaims(ctx)
	}
	steps, from := []step(nil), w.restartFromFiles
	if w.row.KeepsMemory() {
		from = w.restore
	}
	w.moved = !w.row.Address.IsValid()
	if w.moved {
		steps = append(steps, step{name: "address", do: w.takeAnother})
	}
	steps = append(steps, step{do: from})
	if w.moved {
		steps = append(steps, step{name: "hold", do: w.holdAddress})
	}
	for _, s := range steps {
		if s.name == "" {
			if err := s.do(ctx); err != nil {
				return err
			}
			continue
		}
		if err := w.doOne(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// forgetMemory has Run remove the image of a sandbox that was resumed from it, for which nobody
// has to wait. If that is not done, the next checkpoint, the removal or the next start does it.
func (n *Node) forgetMemory(u *registry.Handle) {
	n.tasks.Start(func(ctx context.Context) {
		ctx, done, err := u.Acquire(ctx)
		if err != nil {
			return
		}
		defer done()
		if r := u.Row(); u.IsRemoved() || r == nil || r.OnDisk() {
			return // removed, or asleep again
		}
		if err := memimage.Remove(n.memoryDir(string(u.ID))); err != nil {
			n.log.WarnContext(ctx, "memory of a sandbox that was resumed is left on disk", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		}
		failpoint.Reach("node/forgotten")
	})
}

// rollBackResume takes back what a failed try to wake a sandbox has done.
func (n *Node) rollBackResume(ctx context.Context, u *registry.Handle, w *operation, cause error) error {
	if ctx.Err() != nil {
		cause = fmt.Errorf("%w: %w", cause, errs.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	failures := []error{fmt.Errorf("resume from disk: %w", errs.Retryable(cause))}
	if u.Row().Stage == journal.Live { // the failure followed the last write
		failures = append(failures, n.handles.Note(u, w.row, journal.Storing))
	}
	return errors.Join(append(failures, w.releaseResources(ctx, u))...)
}

// checkMemory finds what would fail before anything is touched. What only the machine's owner
// can mend is an errs.ErrConflict: the sandbox is not lost by it.
func (w *operation) checkMemory(ctx context.Context) error {
	img, err := memimage.Read(w.n.memoryDir(w.id()))
	if err != nil {
		return damaged(err)
	}
	runtime, err := w.n.runtimes.ForBuild(img.Build)
	if err != nil {
		return orFiles(fmt.Errorf("its memory on disk cannot be used: %w", err))
	}
	build, err := runtime.Build(ctx)
	if err != nil {
		return errs.Retryable(err)
	}
	return orFiles(build.Restores(img.Build))
}

// damaged is the error for memory on disk that is not as it was written. It is the fault of nobody
// who asks.
func damaged(err error) error {
	if errs.Kind(err) == nil || errors.Is(err, errs.ErrUnavailable) {
		return errs.Retryable(err)
	}
	if errors.Is(err, errs.ErrConflict) {
		return orFiles(err)
	}
	return orFiles(fmt.Errorf("its memory on disk is damaged: %s: %w", errs.Text(err), errs.ErrConflict))
}

// verify reads the memory on disk through.
func (w *operation) verify(ctx context.Context) error {
	if err := memimage.Verify(ctx, w.n.memoryDir(w.id())); err != nil {
		if ctx.Err() != nil {
			return errs.Retryable(err)
		}
		return damaged(err)
	}
	return nil
}

// restore does the steps from disk to an agent that answers. The bundle is the one that the
// sandbox was started from: its specification must be the checkpointed one.
//
// Nothing is started before all of the memory was found to be as it was written.
func (w *operation) restore(ctx context.Context) error {
	defer w.closeConsole()
	group, together := errgroup.WithContext(ctx)
	for _, s := range []step{{name: "verify", do: w.verify}, {name: "network", do: w.attach}, {name: "mount", do: w.mountAgain}} {
		group.Go(func() error { return w.doOne(together, s) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for _, s := range []step{{name: "tell", do: w.tellMoved}, {name: "restore", do: w.load}, {name: "agent", do: w.awaitRestored}} {
		if err := w.doOne(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// awaitRestored returns when the agent has answered and knows that it was restored. One from before
// there was such a thing is told the time.
func (w *operation) awaitRestored(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.n.cfg.StartTimeout)
	defer cancel()
	agent, err := w.awaitHealth(ctx)
	if err != nil {
		return err
	}
	now := time.Now()
	err = agent.Restored(ctx, now)
	if refused, ok := errors.AsType[*envd.Error](err); ok && (refused.Status == http.StatusNotFound || refused.Status == http.StatusUnauthorized) {
		err = agent.Init(ctx, envd.InitRequest{Timestamp: &now})
	}
	if err != nil {
		return errs.Retryable(fmt.Errorf("tell its agent that it was restored: %w", err))
	}
	return nil
}

// tellMoved writes into the agent's configuration, which it reads when it is restored, where the
// sandbox is now. What is in its other files only the agent may change: the kernel in the memory
// knows them as they are.
func (w *operation) tellMoved(context.Context) error {
	if !w.moved {
		return nil
	}
	cfg, err := w.rewriteConfig()
	if err != nil {
		return err
	}
	cfg.SystemFiles = w.systemFiles()
	return errs.Retryable(envd.WriteConfig(w.agentConfigFile(), cfg))
}

// freshAgent has a container that is started anew begin with the agent of this server, as it was
// installed: one of before may not understand what was written for it since.
func (w *operation) freshAgent(context.Context) error {
	link := filepath.Join(w.path("agent"), filepath.Base(oci.AgentPath))
	have, err := os.Stat(link)
	ours, more := os.Stat(w.n.agentFile)
	if err == nil && more == nil && os.SameFile(have, ours) {
		return nil
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Retryable(err)
	}
	return errs.Retryable(os.Link(w.n.agentFile, link))
}

func (w *operation) agentConfigFile() string {
	return filepath.Join(w.path("agent"), filepath.Base(envd.ConfigPath))
}

func (w *operation) closeConsole() {
	if w.console != nil {
		_ = w.console.Close()
	}
}

func (w *operation) mountAgain(ctx context.Context) (err error) {
	if w.rootfs, err = w.n.cfg.Containerd.Snapshot(ctx, w.id()); err != nil {
		return err
	}
	return w.mount(ctx)
}

// load starts the container from its memory on disk.
func (w *operation) load(ctx context.Context) (err error) {
	runtime, err := w.n.runtimes.ForBuild(w.row.Memory.Build)
	if err != nil {
		return orFiles(err)
	}
	w.row.Build = w.row.Memory.Build.SHA256
	if w.console, err = oci.NewConsole(); err != nil {
		return errs.Retryable(err)
	}
	pid, err := runtime.Restore(ctx, w.id(), w.n.dir(w.id()), w.n.memoryDir(w.id()), w.console, oci.RestoreOptions{Background: true, Later: w.n.tasks.Start})
	if err != nil {
		return damaged(err)
	}
	if w.row.Process, err = lifecycle.ProcessOf(pid); err != nil {
		return errs.Retryable(fmt.Errorf("it ended at once: %w: %s", err, w.console.Text()))
	}
	w.row.StartedAt = time.Now()
	return nil
}

// takeOverStored makes a sandbox of the journal that sleeps on disk this node's own. One at rest is
// not touched.
func (n *Node) takeOverStored(ctx context.Context, u *registry.Handle, r *journal.Row) {
	n.setStored(u, r)
	if !n.atRest(r) {
		n.finishSuspend(ctx, u)
	}
}

// atRest reports whether nothing is left to be done for a sandbox that sleeps on disk.
func (n *Node) atRest(r *journal.Row) bool {
	_, leased := n.allocator.Of(string(r.Plan.Ref.UID))
	return r.Stage == journal.Stored && leased == r.Address.IsValid() && (!leased || !n.cfg.ReleaseAddresses)
}

// finishSuspend removes what an interruption left of the container of a sandbox whose memory is on
// disk. Failing is no reason for anything else to fail: the sweep and the next Resume try again.
func (n *Node) finishSuspend(ctx context.Context, u *registry.Handle) {
	if r := u.Row(); r != nil && n.atRest(r) {
		return
	}
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || !r.OnDisk() || n.atRest(r) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	w := &operation{n: n, row: new(journal.Row)}
	*w.row = *r
	if err := w.releaseResources(ctx, u); err != nil {
		n.log.WarnContext(ctx, "rest of a sandbox whose memory is on disk is left on the machine", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}
