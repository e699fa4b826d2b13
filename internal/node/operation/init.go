package operation

import (
	"context"
	"errors"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// maxInitOutput limits what is kept of the output of a failed init container, in bytes.
const maxInitOutput = 1 << 10

// initContainer is an operation on an init container. It has the sandbox's ID, cgroup and network, because the sandbox
// does not run yet, and files of its own.
func (w *Operation) initContainer(i int) *Operation {
	return &Operation{
		host: w.host, Row: &journal.Row{Plan: w.Row.Plan.OfInit(i), Address: w.Row.Address}, init: i + 1,
		outputOnError: w.Row.Plan.Init[i].OutputOnError, netns: w.netns, Pulling: w.Pulling,
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
		one := w.initContainer(i)
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
func (w *Operation) removeInit(ctx context.Context) error {
	dir := w.shared("init")
	if err := ctrd.Unmount(w.shared("init/rootfs")); err != nil {
		return err
	}
	if err := w.host.cfg.Containerd.RemoveSnapshot(ctx, ctrd.InitKey(w.ID())); err != nil {
		return err
	}
	if err := os.Remove(w.shared("init/rootfs")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove mount point: %w", err) // never its files through it
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove files: %w", err)
	}
	return nil
}

// runToEnd runs one init container. Its program is the agent's, as the sandbox's is.
func (w *Operation) runToEnd(ctx context.Context) (err error) {
	var progress func(ctrd.Progress)
	if w.Pulling != nil {
		progress = w.Pulling()
	}
	if w.Image, err = w.host.FindImage(ctx, &w.Row.Plan, progress); err != nil {
		return err
	}
	w.Row.ImageEnv = w.Image.Config.Env
	defer w.closeConsole()
	for _, do := range []func(context.Context) error{w.removeInit, w.prepare, w.mount, w.writeBundle} {
		if err := do(ctx); err != nil {
			return err
		}
	}
	if !w.Row.Program {
		return fmt.Errorf("it has no command, and its image no program: %w", errs.ErrInvalid)
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
	starting, cancel := context.WithTimeout(ctx, w.host.cfg.StartTimeout)
	agent, err := w.awaitHealth(starting)
	cancel()
	if err != nil {
		return err
	}
	for {
		state, err := agent.Entrypoint(ctx)
		if err == nil && state.Ended() {
			return w.result(ctx, agent, state)
		}
		err = agent.Logs(ctx, envd.SourceAgent, true, func(envd.LogLine) error { // there is one for the end
			if state, err := agent.Entrypoint(ctx); err != nil || state.Ended() {
				return errInitEnded
			}
			return nil
		})
		if !w.Row.Process.Alive() {
			return sandbox.InitFailed(fmt.Errorf("its kernel ended, perhaps without memory left: %s: %w", w.console.Text(), errs.ErrUnavailable))
		}
		if !lifecycle.Sleep(ctx, maxProbePause) {
			return errs.Retryable(fmt.Errorf("await its end: %w: %w", context.Cause(ctx), err))
		}
	}
}

var errInitEnded = errors.New("the program has ended")

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
