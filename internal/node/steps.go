package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/netdev"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// Labels of containers' records.
const (
	labelSandbox   = "barchan.dev/sandbox"
	labelNamespace = "barchan.dev/namespace"
	labelName      = "barchan.dev/name"
	labelRevision  = "barchan.dev/revision"
	labelAddress   = "barchan.dev/address"
)

// maxConflicts is how many addresses in use by others are put aside before a create gives up.
const maxConflicts = 32

// operation is one sandbox on its way through the steps. Each field is set by one step and read
// by later ones only.
type operation struct {
	n     *Node
	row   *journal.Row
	image ctrd.Image

	// origin is what a new sandbox is made from, if not from its image alone.
	origin *checkpoint.Origin
	// moved says that a sandbox that wakes has another address than it had.
	moved   bool
	netns   string
	rootfs  ctrd.Rootfs
	console *oci.Console
}

// step is one thing that a sandbox needs of the machine. Both functions may be repeated, and
// undo works whether do was ever called, failed, or was called by a process that is gone.
type step struct {
	name string
	do   func(ctx context.Context) error
	undo func(ctx context.Context) error
}

func (w *operation) steps() map[string]step {
	all := map[string]step{}
	for _, s := range []step{
		{"address", w.takeAddress, w.releaseAddress},
		{"network", w.attach, w.detach},
		{"snapshot", w.prepareRoot, w.removeSnapshot},
		{"mount", w.mount, w.unmount},
		{"bundle", w.writeBundle, w.removeFiles},
		{"record", w.writeRecord, w.removeRecord},
		{"verify", w.verifyOrigin, nothing},
		{"start", w.begin, w.kill},
		{"agent", w.meetAgent, nothing},
		{"warmup", w.warmUp, nothing},
		{"hold", w.holdAddress, nothing},
	} {
		all[s.name] = s
	}
	return all
}

func nothing(context.Context) error { return nil }

// stages are the order of doing: chains of one stage run side by side, and all of them have
// ended before the next stage begins.
func stages() [][][]string {
	return [][][]string{
		{{"address", "network"}, {"snapshot", "mount"}, {"verify"}},
		{{"bundle"}, {"record"}},
		{{"start"}},
		{{"agent", "warmup"}, {"hold"}},
	}
}

// backwards is the order of undoing. What keeps the machine's resources in use goes first;
// the address goes last, and only when all else is gone.
func backwards() []string {
	return []string{"start", "record", "mount", "bundle", "snapshot", "network", "address"}
}

// do takes the work through all steps. On failure the caller undoes them.
func (w *operation) do(ctx context.Context) error {
	defer func() {
		if w.console != nil {
			_ = w.console.Close()
		}
	}()
	all := w.steps()
	for _, stage := range stages() {
		group, groupCtx := errgroup.WithContext(ctx)
		for _, chain := range stage {
			group.Go(func() error {
				for _, name := range chain {
					if err := w.doOne(groupCtx, all[name]); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	return nil
}

func (w *operation) doOne(ctx context.Context, s step) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("step %s: %w", s.name, context.Cause(ctx))
	}
	began := time.Now()
	if err := s.do(ctx); err != nil {
		return fmt.Errorf("step %s: %w", s.name, err)
	}
	w.n.observeStep(w.row.Plan.Class, s.name, time.Since(began))
	return w.after(s.name)
}

// after lets a test break things after a step.
func (w *operation) after(step string) error {
	if w.n.cfg.AfterStep == nil {
		return nil
	}
	if err := w.n.cfg.AfterStep(step); err != nil {
		return fmt.Errorf("step %s: %w", step, err)
	}
	return nil
}

func (n *Node) observeStep(class oci.Class, step string, took time.Duration) {
	n.cfg.ObserveStep(string(class), step, took)
}

// undo takes all steps back. One that fails does not keep the others from being undone, but
// it keeps the address.
func (w *operation) undo(ctx context.Context) error {
	all := w.steps()
	var failures []error
	for _, name := range backwards() {
		if name == "address" && errors.Join(failures...) != nil {
			break
		}
		began := time.Now()
		if err := w.undoOne(ctx, all[name]); err != nil {
			failures = append(failures, fmt.Errorf("undo step %s: %w", name, err))
			continue
		}
		w.n.observeStep(w.row.Plan.Class, "undo_"+name, time.Since(began))
		failpoint.ReachIn("undo", name)
	}
	return errors.Join(failures...)
}

func (w *operation) undoOne(ctx context.Context, s step) error {
	if w.n.cfg.BeforeUndo != nil {
		if err := w.n.cfg.BeforeUndo(s.name); err != nil {
			return err
		}
	}
	return s.undo(ctx)
}

// id is the name of the sandbox's container, snapshot, namespace and directory.
func (w *operation) id() string { return string(w.row.Plan.ID) }

func (w *operation) uid() string { return string(w.row.Plan.Ref.UID) }

// dir is the sandbox's directory: bundle, root filesystem's mount point, scratch volumes.
func (n *Node) dir(id string) string { return filepath.Join(n.cfg.DataDir, "sandboxes", id) }

func (w *operation) path(name string) string { return filepath.Join(w.n.dir(w.id()), name) }

func (n *Node) cgroup(id string) string { return path.Join(n.cfg.CgroupParent, id) }

func (w *operation) endpoint() netdev.Endpoint {
	return netdev.Endpoint{ID: w.id(), Address: w.row.Address, Address6: w.n.beside(w.row.Address)}
}

// takeAddress reserves an address that nobody live has: the books may be wrong, the live are not.
func (w *operation) takeAddress(ctx context.Context) error {
	for range maxConflicts {
		addr, err := w.n.allocator.Reserve(w.uid())
		if err != nil {
			return err
		}
		holder, err := w.n.holder(ctx, addr, w.row.Plan.ID)
		if err != nil {
			return fmt.Errorf("who uses %s is not known: %w", addr, err)
		}
		if holder == "" {
			w.row.Address = addr
			return nil
		}
		w.n.log.ErrorContext(ctx, "a free address is in use; it is quarantined", telemetry.Address, addr, "by", holder)
		if err := w.n.allocator.Quarantine(addr, "in use by "+holder); err != nil {
			return err
		}
	}
	return fmt.Errorf("%d addresses in a row are in use by what the books do not know, and are quarantined; see `barchan net leases`: %w",
		maxConflicts, errs.ErrExhausted)
}

func (w *operation) releaseAddress(context.Context) error {
	lease, ok := w.n.allocator.Of(w.uid())
	if !ok {
		return nil
	}
	return w.n.allocator.Release(w.uid(), lease.Address)
}

func (w *operation) holdAddress(context.Context) error {
	return w.n.allocator.Hold(w.uid(), w.row.Address)
}

func (w *operation) attach(ctx context.Context) error {
	at, err := w.n.network.Attach(ctx, w.endpoint())
	if err != nil {
		return errs.Retryable(err)
	}
	w.netns = at.NetnsPath
	return w.n.applyEgress(ctx, w.row) // before anything of it can run
}

func (w *operation) detach(ctx context.Context) error {
	ep := w.endpoint()
	if lease, ok := w.n.allocator.Of(w.uid()); ok && !ep.Address.IsValid() {
		ep.Address, ep.Address6 = lease.Address, w.n.beside(lease.Address)
	}
	return w.n.network.Detach(ctx, ep)
}

func (w *operation) prepare(ctx context.Context) (err error) {
	w.rootfs, err = w.n.cfg.Containerd.Prepare(ctx, w.id(), w.image)
	return err
}

func (w *operation) removeSnapshot(ctx context.Context) error {
	return w.n.cfg.Containerd.RemoveSnapshot(ctx, w.id())
}

func (w *operation) mount(context.Context) error {
	dir := w.path("rootfs")
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return errs.Retryable(err)
	}
	if err := ctrd.Unmount(dir); err != nil {
		return errs.Retryable(err)
	}
	if err := w.rootfs.Mount(dir); err != nil {
		return errs.Retryable(err)
	}
	return nil
}

func (w *operation) unmount(context.Context) error { return ctrd.Unmount(w.path("rootfs")) }

// removeFiles removes all files of the sandbox, the directories of its claims too.
func (w *operation) removeFiles(ctx context.Context) error {
	if err := w.removeOwnFiles(ctx); err != nil {
		return err
	}
	if err := os.RemoveAll(w.n.claimsDir(w.id())); err != nil {
		return fmt.Errorf("remove volume claims: %w", err)
	}
	return nil
}

// removeOwnFiles removes the sandbox's directory and its memory on disk. The root's mount point
// must be empty: what is still mounted there is not deleted through it.
func (w *operation) removeOwnFiles(ctx context.Context) error {
	if err := w.removeMemory(ctx); err != nil {
		return err
	}
	if err := os.Remove(w.path("rootfs")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove mount point: %w", err)
	}
	if err := os.RemoveAll(w.n.dir(w.id())); err != nil {
		return fmt.Errorf("remove files: %w", err)
	}
	return nil
}

func (w *operation) writeRecord(ctx context.Context) error {
	p := &w.row.Plan
	return w.n.cfg.Containerd.CreateContainer(ctx, ctrd.Container{
		ID: w.id(), Image: w.image.Ref, Runtime: string(p.Class), Snapshot: w.id(),
		Labels: map[string]string{
			labelSandbox: w.uid(), labelNamespace: p.Ref.Namespace, labelName: p.Ref.Name,
			labelRevision: p.Revision, labelAddress: w.row.Address.String(),
		},
	})
}

func (w *operation) removeRecord(ctx context.Context) error {
	return w.n.cfg.Containerd.RemoveContainer(ctx, w.id())
}

func (w *operation) start(ctx context.Context) (err error) {
	if w.console, err = oci.NewConsole(); err != nil {
		return errs.Retryable(err)
	}
	runtime, err := w.n.runtimes.Of(w.row.Plan.Class)
	if err != nil {
		return err
	}
	w.row.Build = w.n.runtimes.BuildOf(w.row.Plan.Class)
	pid, err := runtime.Run(ctx, w.id(), w.n.dir(w.id()), w.console)
	if err != nil {
		return errs.Retryable(err)
	}
	if w.row.Process, err = lifecycle.ProcessOf(pid); err != nil {
		return errs.Retryable(fmt.Errorf("it ended at once: %w: %s", err, w.console.Text()))
	}
	w.row.StartedAt = time.Now()
	return nil
}

// kill ends the container, and what an interrupted runtime left of one.
func (w *operation) kill(ctx context.Context) error {
	if w.row.Process.PID != 0 {
		if err := w.row.Process.Signal(syscall.SIGKILL); err != nil {
			return err
		}
	}
	for class, r := range w.n.runtimes.All() {
		if class != w.row.Plan.Class && w.n.runtimes.Offers(w.row.Plan.Class) {
			continue // one that is unknown, or not offered any more, is asked of all: they kill by cgroup
		}
		if err := r.Remove(ctx, w.id(), w.n.cgroup(w.id())); err != nil {
			return err
		}
	}
	return nil
}
