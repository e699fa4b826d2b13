package operation

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/agentconn"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// maxInitOutput limits what is kept of the output of a failed init container, in bytes.
const maxInitOutput = 1 << 10

// other is an operation on another container of the sandbox than the first. It has the sandbox's ID and network, and files of
// its own.
func (w *Operation) other(c *plan.Container, part string) *Operation {
	return &Operation{
		host: w.host, Row: &journal.Row{Plan: w.Row.Plan.Of(c), Address: w.Row.Address, Process: w.Row.Process, Disk: w.Row.Disk}, part: part,
		outputOnError: c.OutputOnError, Pulling: w.Pulling, moved: w.moved, Origin: w.Origin,
	}
}

// runInit runs the init containers in order, each to its end. A sandbox from a checkpoint has what its origin's made.
func (w *Operation) runInit(ctx context.Context) error {
	if w.Origin != nil {
		return nil
	}
	all := w.Row.Plan.Init
	for i := range all {
		if w.Initializing != nil {
			w.Initializing(all[i].Name, i+1, len(all))
		}
		one := w.other(&all[i], ctrd.InitPart) // with the sandbox's cgroup too, because the sandbox does not run yet
		one.Row.Plan.Name, one.init = "", i+1
		err := one.runToEnd(ctx)
		if err = errors.Join(err, w.Kill(ctx), one.removeInit(ctx)); err != nil {
			return fmt.Errorf("init container %s: %w", all[i].Name, err)
		}
		if err := w.attach(ctx); err != nil { // the runtime has removed the address
			return err
		}
	}
	return nil
}

// removeInit removes the files of the init container that ran last.
func (w *Operation) removeInit(ctx context.Context) error { return w.removePart(ctx, ctrd.InitPart) }

// removePart removes the files of another container.
func (w *Operation) removePart(ctx context.Context, part string) error {
	root := w.shared(filepath.Join(part, "rootfs"))
	if err := ctrd.Unmount(root); err != nil {
		return err
	}
	if err := w.host.cfg.Containerd.RemoveSnapshot(ctx, ctrd.PartKey(w.ID(), part)); err != nil {
		return err
	}
	if err := os.Remove(root); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove mount point: %w", err) // never its files through it
	}
	failures := []error{os.RemoveAll(w.shared(part))}
	if writes := w.host.Disks(w.Row).Writes(part); writes != "" {
		failures = append(failures, os.RemoveAll(writes))
	}
	if err := errors.Join(failures...); err != nil {
		return fmt.Errorf("remove files: %w", err)
	}
	return nil
}

// makeFiles makes the files of another container from its image or its checkpoint.
func (w *Operation) makeFiles(ctx context.Context) error {
	remove := func(ctx context.Context) error { return w.removePart(ctx, w.part) }
	for _, do := range []func(context.Context) error{w.FindImage, remove, w.prepareRoot, w.mount, w.writeBundle} {
		if err := do(ctx); err != nil {
			return err
		}
	}
	if !w.Row.Program {
		return fmt.Errorf("it has no command, and its image no program: %w", errs.ErrInvalid)
	}
	return nil
}

// runToEnd runs one init container. Its program is the agent's, as the sandbox's is.
func (w *Operation) runToEnd(ctx context.Context) (err error) {
	defer w.closeConsole()
	if err := w.makeFiles(ctx); err != nil {
		return err
	}
	if err := w.start(ctx); err != nil {
		return err
	}
	if err := w.After("init_started"); err != nil {
		return err
	}
	return w.awaitEnd(ctx)
}

// awaitEnd returns when the program has ended with code 0.
func (w *Operation) awaitEnd(ctx context.Context) error {
	agent, err := w.host.Agents.AwaitHealth(ctx, w.conn())
	if err != nil {
		return err
	}
	if err := w.LimitCPU(ctx); err != nil {
		return err
	}
	for {
		state, err := agent.AwaitEntrypoint(ctx)
		if err == nil {
			return w.result(ctx, agent, state)
		}
		if !w.Row.Process.Alive() {
			return sandbox.InitFailed(fmt.Errorf("its kernel ended, perhaps without memory left: %s: %w", w.console.Text(), errs.ErrUnavailable))
		}
		if !lifecycle.Sleep(ctx, agentconn.MaxPause) {
			return errs.Retryable(fmt.Errorf("await its end: %w: %w", context.Cause(ctx), err))
		}
	}
}

// result is nil for code 0. Another ends a sandbox with restartPolicy Never; others are made again.
func (w *Operation) result(ctx context.Context, agent *envd.Client, state envd.Entrypoint) error {
	if state.ExitCode != nil && *state.ExitCode == 0 {
		return nil
	}
	what := "did not start"
	if state.ExitCode != nil {
		what = fmt.Sprintf("ended with code %d", *state.ExitCode)
	}
	if state.Error != "" {
		what += ": " + state.Error
	}
	if w.outputOnError {
		what += ": " + agent.LastOutput(ctx, maxInitOutput)
	}
	kind := errs.ErrUnavailable
	if w.Row.Plan.Restart == corev1.RestartPolicyNever {
		kind = errs.ErrInvalid
	}
	return sandbox.InitFailed(fmt.Errorf("%s: %w", what, kind))
}
