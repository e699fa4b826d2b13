// Package operation changes the host for one sandbox, by ordered lists of steps: create, undo, save memory or
// files, release, bring up, restart, bind. Every step may be repeated, and every undo works without its do.
//
//	address → network ┐                ┌ bundle ┐         ┌ agent responds ┐
//	                  ├ both finished →┤        ├ start → ┤                ├ live
//	snapshot → mount  ┘                └ record ┘         └ address held   ┘
//
// An operation changes its own copy of a row. It writes no journal, has no lock and changes no handle: the caller holds
// the sandbox's lock and writes the row before and after.
package operation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
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
	"github.com/barchan-dev/barchan/internal/node/operation/timing"
	"github.com/barchan-dev/barchan/internal/node/references"
)

// Labels of containers.
const (
	LabelSandbox   = "barchan.dev/sandbox"
	LabelNamespace = "barchan.dev/namespace"
	LabelName      = "barchan.dev/name"
	labelRevision  = "barchan.dev/revision"
	LabelAddress   = "barchan.dev/address"
)

// Operation is the state of an operation on one sandbox. Each field is set by one step and only read by later
// ones.
type Operation struct {
	*timing.Steps // nil for containers besides the first
	host          *Host
	Row           *journal.Row
	Image         ctrd.Image

	// Origin is the checkpoint that a new sandbox is created from; nil for its image.
	Origin *checkpoint.Origin
	// moved means that a resuming sandbox has a new address.
	moved bool
	// part is the directory of another container than the first, within the sandbox's: that of init containers, or a sidecar's.
	part string
	// init is 1 for the first init container; 0 for all others.
	init int
	// outputOnError is that of the init container.
	outputOnError bool
	// Initializing is called before each init container.
	Initializing func(name string, number, of int)
	// Pulling returns what receives the progress of a pull for an init container; nil: none.
	Pulling func() func(ctrd.Progress)
	// resolved is nil before Resolve.
	resolved *references.Values
	rootfs   ctrd.Rootfs
	console  *oci.Console
}

// step is one change of the host. Both functions may be repeated, and undo works whether do was never called,
// failed, or was called by an earlier process.
type step struct {
	name string
	do   func(ctx context.Context) error
	undo func(ctx context.Context) error
}

func (w *Operation) steps() map[string]step {
	all := map[string]step{}
	for _, s := range []step{
		{"address", w.takeAddress, w.releaseAddress},
		{"network", w.attach, w.detach},
		{"snapshot", w.prepareRoot, w.removeSnapshot},
		{"mount", w.mount, w.discardRoot},
		{"bundle", w.writeBundle, w.removeFiles},
		{"record", w.WriteRecord, w.removeRecord},
		{"sidecar_files", w.makeSidecars, w.removeSidecars},
		{"init", w.runInit, w.removeInit},
		{"verify", w.verifyOrigin, noop},
		{"start", w.startOrRestore, w.Kill},
		{"agent", w.awaitNewAgent, noop},
		{"sidecars", w.startSidecars, noop},
		{"limit", w.LimitCPU, noop},
		{"warmup", w.warmUp, noop},
		{"hold", w.holdAddress, noop},
	} {
		all[s.name] = s
	}
	return all
}

func noop(context.Context) error { return nil }

// stages are the order of the steps: the chains of a stage run in parallel, and end before the next stage
// begins.
func stages() [][][]string {
	return [][][]string{
		{{"address", "network"}, {"snapshot", "mount"}, {"verify"}},
		{{"bundle", "sidecar_files"}, {"record"}},
		{{"init"}},
		{{"start"}},
		{{"agent", "sidecars", "limit", "warmup"}, {"hold"}},
	}
}

// Backwards is the order of undoing. Users of the host's resources come first; the address comes last, and
// only if all else is removed.
func Backwards() []string {
	return []string{"start", "init", "sidecar_files", "record", "mount", "bundle", "snapshot", "network", "address"}
}

// Create does all steps. On failure the caller undoes them.
func (w *Operation) Create(ctx context.Context) error {
	defer func() {
		if w.console != nil {
			_ = w.console.Close()
		}
	}()
	for _, stage := range stages() {
		group, groupCtx := errgroup.WithContext(ctx)
		for _, chain := range stage {
			group.Go(func() error {
				for _, name := range chain {
					if err := w.DoStep(groupCtx, name); err != nil {
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

func (w *Operation) doAll(ctx context.Context, steps []step) error {
	for _, s := range steps {
		if err := w.doOne(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// DoStep does one step of a create.
func (w *Operation) DoStep(ctx context.Context, name string) error {
	return w.doOne(ctx, w.steps()[name])
}

func (w *Operation) doOne(ctx context.Context, s step) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("step %s: %w", s.name, context.Cause(ctx))
	}
	began := time.Now()
	traced, end := telemetry.StartSpan(ctx, "step "+s.name)
	err := s.do(traced)
	end(err)
	if err != nil {
		return fmt.Errorf("step %s: %w", s.name, err)
	}
	w.host.cfg.ObserveStep(string(w.Row.Plan.Class), s.name, time.Since(began))
	w.Record(s.name, began)
	return w.After(s.name)
}

// After lets a test fail an operation after a step.
func (w *Operation) After(step string) error {
	if err := w.host.cfg.AfterStep(step); err != nil {
		return fmt.Errorf("step %s: %w", step, err)
	}
	return nil
}

// Undo undoes all steps. After a failure the others are still undone, but the address is kept.
func (w *Operation) Undo(ctx context.Context) error {
	all := w.steps()
	var failures []error
	for _, name := range Backwards() {
		if name == "address" && errors.Join(failures...) != nil {
			break
		}
		began := time.Now()
		if err := w.undoOne(ctx, all[name]); err != nil {
			failures = append(failures, fmt.Errorf("undo step %s: %w", name, err))
			continue
		}
		w.host.cfg.ObserveStep(string(w.Row.Plan.Class), "undo_"+name, time.Since(began))
		failpoint.ReachIn("undo", name)
	}
	return errors.Join(failures...)
}

func (w *Operation) undoOne(ctx context.Context, s step) error {
	if err := w.host.cfg.BeforeUndo(s.name); err != nil {
		return err
	}
	return s.undo(ctx)
}

// ID is the name of the sandbox's container, snapshot, namespace and directory.
func (w *Operation) ID() string { return string(w.Row.Plan.ID) }

func (w *Operation) uid() string { return string(w.Row.Plan.Ref.UID) }

// Path is a file in the directory of the container.
func (w *Operation) Path(name string) string { return w.shared(filepath.Join(w.part, name)) }

// shared is a file in the sandbox's directory.
func (w *Operation) shared(name string) string { return filepath.Join(w.host.Dir(w.ID()), name) }

// snapshotKey is the name of the writable copy of the image.
func (w *Operation) snapshotKey() string {
	return ctrd.PartKey(w.ID(), w.part)
}

// Endpoint is the sandbox's network endpoint, by the addresses in the row.
func (w *Operation) Endpoint() netdev.Endpoint {
	return netdev.Endpoint{ID: w.ID(), Address: w.Row.Address, Address6: w.host.Beside(w.Row.Address)}
}

// takeAddress reserves an address that is not in use.
func (w *Operation) takeAddress(ctx context.Context) (err error) {
	w.Row.Address, err = w.host.cfg.Allocator.ReserveUnused(ctx, w.uid(), func(ctx context.Context, addr netip.Addr) (string, error) {
		return w.host.cfg.Holder(ctx, addr, w.Row.Plan.ID)
	})
	return err
}

func (w *Operation) releaseAddress(context.Context) error {
	lease, ok := w.host.cfg.Allocator.Of(w.uid())
	if !ok {
		return nil
	}
	return w.host.cfg.Allocator.Release(w.uid(), lease.Address)
}

func (w *Operation) holdAddress(context.Context) error {
	return w.host.cfg.Allocator.Hold(w.uid(), w.Row.Address)
}

func (w *Operation) attach(ctx context.Context) error {
	if _, err := w.host.cfg.Network.Attach(ctx, w.Endpoint()); err != nil {
		return errs.Retryable(err)
	}
	return w.Timed("firewall", func() error { return w.host.ApplyEgress(ctx, w.Row) }) // before any of its processes can run
}

func (w *Operation) detach(ctx context.Context) error {
	ep := w.Endpoint()
	if lease, ok := w.host.cfg.Allocator.Of(w.uid()); ok && !ep.Address.IsValid() {
		ep.Address, ep.Address6 = lease.Address, w.host.Beside(lease.Address)
	}
	return w.host.cfg.Network.Detach(ctx, ep)
}

func (w *Operation) prepare(ctx context.Context) (err error) {
	w.rootfs, err = w.host.cfg.Containerd.Prepare(ctx, w.snapshotKey(), w.Image)
	return err
}

func (w *Operation) removeSnapshot(ctx context.Context) error {
	return w.host.cfg.Containerd.RemoveSnapshot(ctx, w.snapshotKey())
}

func (w *Operation) mount(ctx context.Context) (err error) {
	dir, disks := w.Path("rootfs"), w.host.Disks(w.Row)
	if err := w.Timed("disk", func() error { return disks.Mount(ctx) }); err != nil {
		return err
	}
	if w.rootfs, err = w.rootfs.Over(disks.Writes(w.part)); err != nil {
		return errs.Retryable(err)
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return errs.Retryable(err)
	}
	if err := ctrd.Unmount(dir); err != nil {
		return errs.Retryable(err)
	}
	if err := w.rootfs.Mount(dir, w.Row.Plan.Class != oci.GVisor); err != nil {
		return errs.Retryable(err)
	}
	return nil
}

func (w *Operation) unmount(context.Context) error {
	return errors.Join(ctrd.Unmount(w.Path("rootfs")), w.host.Disks(w.Row).Unmount())
}

// discardRoot is the undo of mount: what was not written yet is not.
func (w *Operation) discardRoot(context.Context) error {
	return errors.Join(ctrd.Unmount(w.Path("rootfs")), w.host.Disks(w.Row).Discard())
}

// removeFiles removes all files of the sandbox, including its claims' directories.
func (w *Operation) removeFiles(ctx context.Context) error {
	if err := w.removeOwnFiles(ctx); err != nil {
		return err
	}
	if err := os.RemoveAll(w.host.ClaimsDir(w.ID())); err != nil {
		return fmt.Errorf("remove volume claims: %w", err)
	}
	return nil
}

// removeOwnFiles removes the sandbox's directory and its memory on disk. The root's mount point must be
// empty: files still mounted there are not deleted through it.
func (w *Operation) removeOwnFiles(ctx context.Context) error {
	if err := w.RemoveMemory(ctx); err != nil {
		return err
	}
	if err := ctrd.Unmount(w.projectedDir()); err != nil {
		return err
	}
	if err := os.Remove(w.Path("rootfs")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove mount point: %w", err)
	}
	if err := os.RemoveAll(w.host.Dir(w.ID())); err != nil {
		return fmt.Errorf("remove files: %w", err)
	}
	return nil
}

// WriteRecord creates the containerd container, which is metadata: nothing runs yet.
func (w *Operation) WriteRecord(ctx context.Context) error {
	p := &w.Row.Plan
	return w.host.cfg.Containerd.CreateContainer(ctx, ctrd.Container{
		ID: w.ID(), Image: w.Image.Ref, Runtime: string(p.Class), Snapshot: w.ID(),
		Labels: map[string]string{
			LabelSandbox: w.uid(), LabelNamespace: p.Ref.Namespace, LabelName: p.Ref.Name,
			labelRevision: p.Revision, LabelAddress: w.Row.Address.String(),
		},
	})
}

func (w *Operation) removeRecord(ctx context.Context) error {
	return w.host.cfg.Containerd.RemoveContainer(ctx, w.ID())
}

func (w *Operation) start(ctx context.Context) (err error) {
	if w.console, err = oci.NewConsole(); err != nil {
		return errs.Retryable(err)
	}
	runtime, err := w.host.cfg.Runtimes.Of(w.Row.Plan.Class)
	if err != nil {
		return err
	}
	w.Row.Build = w.host.cfg.Runtimes.BuildOf(w.Row.Plan.Class)
	pid, err := runtime.Run(ctx, w.containerID(), w.Path(""), w.console)
	if err != nil {
		return errs.Retryable(err)
	}
	if w.Row.Process, err = lifecycle.ProcessOf(pid); err != nil {
		return errs.Retryable(fmt.Errorf("it ended at once: %w: %s", err, w.console.Text()))
	}
	w.Row.StartedAt = time.Now()
	return nil
}

// LimitCPU applies the CPU limit of a sandbox, of which its start may use more.
func (w *Operation) LimitCPU(context.Context) error {
	return errs.Retryable(w.Row.Plan.Limits.LimitCPU(w.host.Cgroup(w.ID())))
}

// Kill ends the container, and leftovers of an interrupted runtime.
func (w *Operation) Kill(ctx context.Context) error {
	if w.Row.Process.PID != 0 {
		if err := w.Row.Process.Signal(syscall.SIGKILL); err != nil {
			return err
		}
	}
	for class, r := range w.host.cfg.Runtimes.All() {
		if class != w.Row.Plan.Class && w.host.cfg.Runtimes.Offers(w.Row.Plan.Class) {
			continue // of an unknown or no longer offered class, all runtimes try: they kill by cgroup
		}
		if err := r.Remove(ctx, w.ID(), w.host.Cgroup(w.ID())); err != nil {
			return err
		}
	}
	return nil
}

// StepNames returns the names of the steps of a create, in any order.
func StepNames() (names []string) {
	for name := range (&Operation{}).steps() {
		names = append(names, name)
	}
	return names
}

// ErrCrash makes a failed step leave everything as it is, like a crash. Config.AfterStep returns it, in
// tests.
var ErrCrash = errors.New("crash on purpose")
