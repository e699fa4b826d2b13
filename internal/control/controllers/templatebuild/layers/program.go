package layers

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

const (
	// pollFirst and pollMost are how often the ready command is run.
	pollFirst = 50 * time.Millisecond
	pollMost  = time.Second
	// settle is how long a build without a ready command waits for its start command, as E2B does.
	settle = 20 * time.Second
)

// Result returns what the template's sandboxes are made by. Before that it starts the template's program, if there is one.
func (w *Work) Result(ctx context.Context) (*agents.SandboxBlueprint, *agents.BarchanSpec, error) {
	w.Log.Step = barchan.BuildStepFinalize
	blueprint, policies := w.blueprint(), w.policies()
	policies.Restore = restoreOf(w.checkpoint, true)
	if w.Build.Spec.StartCommand != "" || w.Build.Spec.ReadyCommand != "" {
		name, err := w.startProgram(ctx, blueprint, policies)
		if err != nil {
			return nil, nil, err
		}
		policies.Restore = restoreOf(name, false)
	}
	return blueprint, policies, nil
}

func restoreOf(checkpoint string, filesOnly bool) *agents.RestoreSource {
	if checkpoint == "" {
		return nil
	}
	return &agents.RestoreSource{CheckpointName: checkpoint, FilesOnly: filesOnly}
}

// startProgram runs the start command until the ready command succeeds, and returns the checkpoint with the memory.
func (w *Work) startProgram(ctx context.Context, blueprint *agents.SandboxBlueprint, policies *agents.BarchanSpec) (string, error) {
	spec := &w.Build.Spec
	salt := ""
	if spec.Force {
		salt = string(w.Build.UID)
	}
	name := "build-" + hashOf(form, w.base.key, "start", spec.StartCommand, spec.ReadyCommand, blueprint, policies, salt)
	c, err := w.r.Objects.Checkpoint(ctx, w.key(name))
	if err == nil && c.DeletionTimestamp == nil && c.Status.Phase == barchan.CheckpointReady {
		w.Log.Say(builds.LevelInfo, "CACHED start command")
		return name, w.touch(ctx, c)
	} else if err != nil && !errors.Is(err, errs.ErrNotFound) {
		return "", err
	}
	s, err := w.start(ctx, blueprint, policies)
	if err != nil {
		return "", err
	}
	defer w.remove(ctx, s)
	detach, err := w.launch(ctx, s)
	if err != nil {
		return "", err
	}
	defer detach()
	if err := w.awaitReady(ctx, s); err != nil {
		return "", err
	}
	detach()
	c, err = w.keep(ctx, s, name, barchan.ContentMemoryAndFiles)
	if err != nil {
		return "", err
	}
	if c.Status.Content != barchan.ContentMemoryAndFiles {
		return "", buildlog.Refuse(barchan.BuildStepFinalize, "spec.startCommand: class %s keeps no memory, in which the program would run; choose class %s, or leave the command out", c.Status.Runtime, agents.RuntimeGVisor)
	}
	return name, nil
}

// launch starts the start command. Its output is logged until detach, which leaves it running.
func (w *Work) launch(ctx context.Context, s *started) (detach func(), err error) {
	if w.Build.Spec.StartCommand == "" {
		return func() {}, nil
	}
	agent, err := w.r.Agents.AgentAs(s.Sandbox, w.settings.User)
	if err != nil {
		return nil, err
	}
	w.Log.Say(builds.LevelInfo, "START %s", w.Build.Spec.StartCommand)
	streaming, cut := context.WithCancel(ctx)
	noInput, dir, argv := false, w.settings.Workdir, StartArguments(w.Build.Spec.StartCommand)
	stream, err := agent.Process().Start(streaming, connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:], Envs: w.settings.Env, Cwd: &dir}, Stdin: &noInput,
	}))
	if err != nil {
		cut()
		return nil, w.agentError(ctx, s, "start the start command", err)
	}
	out := w.Log.Output(builds.LevelInfo)
	done := make(chan struct{})
	go func() { // ends with the stream, which detach cuts
		defer close(done)
		defer out.Flush()
		for stream.Receive() {
			switch ev := stream.Msg().GetEvent(); {
			case ev.GetData() != nil:
				_ = envd.WriteOutput(ev.GetData(), out, out) // does not fail
			case ev.GetEnd() != nil:
				out.Flush()
				out.Say(builds.LevelWarn, "the start command has ended with code %d", envd.ExitCode(ev.GetEnd()))
			}
		}
	}()
	return func() {
		cut()
		<-done
		_ = stream.Close()
	}, nil
}

// awaitReady runs the ready command until it succeeds.
func (w *Work) awaitReady(ctx context.Context, s *started) error {
	ready := w.Build.Spec.ReadyCommand
	if ready == "" {
		select {
		case <-time.After(settle):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	agent, err := w.r.Agents.AgentAs(s.Sandbox, w.settings.User)
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeoutCause(ctx, readyTimeout, buildlog.Refuse(barchan.BuildStepFinalize, "spec.readyCommand: it did not succeed within %s", readyTimeout))
	defer stop()
	for pause := pollFirst; ; pause = min(2*pause, pollMost) {
		exit, _, err := agent.Run(ctx, shell(runScript, ready), envd.RunOptions{Env: w.settings.Env, Dir: w.settings.Workdir})
		switch {
		case err != nil:
			return w.agentError(ctx, s, "run the ready command", err)
		case exit == 0:
			return nil
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return w.agentError(ctx, s, "run the ready command", ctx.Err())
		}
	}
}
