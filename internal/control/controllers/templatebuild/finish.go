package templatebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

const (
	// pollFirst and pollMost are how often the ready command is run.
	pollFirst = 50 * time.Millisecond
	pollMost  = time.Second
	// settle is how long a build without a ready command waits for its start command, as E2B does.
	settle = 20 * time.Second
	// writeTries bounds the writes of a template that others change.
	writeTries = 5
)

// finish starts the template's program, and writes the template and the end of the build.
func (w *work) finish(ctx context.Context) error {
	blueprint, policies := w.blueprint(), w.policies()
	policies.Restore = restoreOf(w.checkpoint, true)
	if w.build.Spec.StartCommand != "" || w.build.Spec.ReadyCommand != "" {
		name, err := w.startProgram(ctx, blueprint, policies)
		if err != nil {
			return err
		}
		policies.Restore = restoreOf(name, false)
	}
	t, err := w.writeTags(ctx, pool.Result{Build: w.build.Name, Blueprint: blueprint, Policies: policies})
	if err != nil {
		return err
	}
	status := w.build.Status.DeepCopy()
	status.Phase, status.TemplateID, status.CompletedAt = barchan.BuildReady, pool.TemplateID(t), new(metav1.Now())
	if policies.Restore != nil {
		status.CheckpointName = policies.Restore.CheckpointName
	}
	w.ready(status, metav1.ConditionTrue, reasonBuilt, "the template has its result")
	return w.write(ctx, status)
}

func restoreOf(checkpoint string, filesOnly bool) *agents.RestoreSource {
	if checkpoint == "" {
		return nil
	}
	return &agents.RestoreSource{CheckpointName: checkpoint, FilesOnly: filesOnly}
}

// startProgram runs the start command until the ready command succeeds, and returns the checkpoint with the memory.
func (w *work) startProgram(ctx context.Context, blueprint *agents.SandboxBlueprint, policies *agents.BarchanSpec) (string, error) {
	spec := &w.build.Spec
	salt := ""
	if spec.Force {
		salt = string(w.build.UID)
	}
	name := "build-" + hashOf(form, w.base.key, "start", spec.StartCommand, spec.ReadyCommand, blueprint, policies, salt)
	c, err := w.r.Objects.Checkpoint(ctx, w.key(name))
	if err == nil && c.DeletionTimestamp == nil && c.Status.Phase == barchan.CheckpointReady {
		w.log.say(builds.LevelInfo, "CACHED start command")
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
		return "", refuse(barchan.BuildStepFinalize, "spec.startCommand: class %s keeps no memory, in which the program would run; choose class %s, or leave the command out", c.Status.Runtime, agents.RuntimeGVisor)
	}
	return name, nil
}

// launch starts the start command. Its output is logged until detach, which leaves it running.
func (w *work) launch(ctx context.Context, s *started) (detach func(), err error) {
	if w.build.Spec.StartCommand == "" {
		return func() {}, nil
	}
	agent, err := w.r.Agents.AgentAs(s.Sandbox, w.settings.User)
	if err != nil {
		return nil, err
	}
	w.log.say(builds.LevelInfo, "START %s", w.build.Spec.StartCommand)
	streaming, cut := context.WithCancel(ctx)
	noInput, dir := false, w.settings.Workdir
	stream, err := agent.Process().Start(streaming, connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", runScript, "sh", w.build.Spec.StartCommand}, Envs: w.settings.Env, Cwd: &dir}, Stdin: &noInput,
	}))
	if err != nil {
		cut()
		return nil, w.agentError(ctx, s, "start the start command", err)
	}
	out := w.output(builds.LevelInfo)
	done := make(chan struct{})
	go func() { // ends with the stream, which detach cuts
		defer close(done)
		defer out.flush()
		for stream.Receive() {
			switch ev := stream.Msg().GetEvent(); {
			case ev.GetData() != nil:
				_ = envd.WriteOutput(ev.GetData(), out, out) // does not fail
			case ev.GetEnd() != nil:
				out.flush()
				out.say(builds.LevelWarn, "the start command has ended with code %d", envd.ExitCode(ev.GetEnd()))
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
func (w *work) awaitReady(ctx context.Context, s *started) error {
	ready := w.build.Spec.ReadyCommand
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
	ctx, stop := context.WithTimeoutCause(ctx, readyTimeout, refuse(barchan.BuildStepFinalize, "spec.readyCommand: it did not succeed within %s", readyTimeout))
	defer stop()
	for pause := pollFirst; ; pause = min(2*pause, pollMost) {
		exit, _, err := agent.Run(ctx, []string{"/bin/sh", "-c", runScript, "sh", ready}, envd.RunOptions{Env: w.settings.Env, Dir: w.settings.Workdir})
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

// tagsOf returns the tags that a build writes.
func tagsOf(b *barchan.TemplateBuild) []string {
	if len(b.Spec.Tags) == 0 {
		return []string{barchan.DefaultTag}
	}
	return b.Spec.Tags
}

// checkTags refuses a build whose tags it cannot write.
func (w *work) checkTags(ctx context.Context) error {
	for _, tag := range tagsOf(w.build) {
		if _, err := w.template(ctx, tag); err != nil {
			return err
		}
	}
	return nil
}

// template returns the object of a tag as it is; nil if there is none. One that no build has made is refused.
func (w *work) template(ctx context.Context, tag string) (*extensions.SandboxTemplate, error) {
	t, name := &extensions.SandboxTemplate{}, w.build.Spec.TemplateName
	err := w.r.Client.Get(ctx, w.key(extensions.TagObject(name, tag)), t)
	if apierrors.IsNotFound(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read tag %s of template %s: %w", tag, name, err)
	}
	if t.Labels[barchan.LabelBuild] == "" {
		return nil, refuse(barchan.BuildStepBase, "spec.templateName: template '%s' exists, and was not made by a build; choose another name, or delete it", t.Name)
	}
	if own, ownTag := t.NameAndTag(); own != name || ownTag != tag {
		return nil, refuse(barchan.BuildStepBase, "spec.tags: '%s:%s' would have the same object as '%s:%s'; choose another tag", name, tag, own, ownTag)
	}
	return t, nil
}

// writeTags writes the result to each tag, and returns one of them.
func (w *work) writeTags(ctx context.Context, result pool.Result) (t *extensions.SandboxTemplate, err error) {
	name := w.build.Spec.TemplateName
	for _, tag := range tagsOf(w.build) {
		if t, err = w.writeTag(ctx, tag, result); err != nil {
			return nil, err
		}
		failpoint.Reach("templatebuild/template")
		if tag == barchan.DefaultTag {
			w.log.say(builds.LevelInfo, "template %s is ready", name)
		} else {
			w.log.say(builds.LevelInfo, "template %s:%s is ready", name, tag)
		}
	}
	return t, nil
}

// writeTag writes the result to a tag. Of one that exists it keeps what a build does not decide.
func (w *work) writeTag(ctx context.Context, tag string, result pool.Result) (*extensions.SandboxTemplate, error) {
	var failure error
	for range writeTries {
		t, err := w.template(ctx, tag)
		if err != nil {
			return nil, err
		}
		if t != nil {
			pool.SetBuild(t, result)
			failure = w.r.Client.Update(ctx, t)
		} else {
			if t, err = w.newTag(ctx, tag); err != nil {
				return nil, err
			}
			pool.SetBuild(t, result)
			failure = w.r.Client.Create(ctx, t)
		}
		switch {
		case failure == nil:
			return t, nil
		case apierrors.IsInvalid(failure), apierrors.IsBadRequest(failure):
			return nil, refuse(barchan.BuildStepFinalize, "template '%s': %s", t.Name, failure.Error())
		case !apierrors.IsConflict(failure) && !apierrors.IsAlreadyExists(failure):
			return nil, fmt.Errorf("write template %s: %w", t.Name, failure)
		}
	}
	return nil, fmt.Errorf("write tag %s of template %s: %w", tag, w.build.Spec.TemplateName, failure)
}

// newTag returns a new tag. It has the aliases and the visibility of the template's others.
func (w *work) newTag(ctx context.Context, tag string) (*extensions.SandboxTemplate, error) {
	t := pool.NewTag(w.build.Namespace, w.build.Spec.TemplateName, tag)
	var list extensions.SandboxTemplateList
	if err := w.r.Client.List(ctx, &list, client.InNamespace(w.build.Namespace)); err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	for i := range list.Items {
		other := &list.Items[i]
		if name, _ := other.NameAndTag(); name == w.build.Spec.TemplateName && other.Spec.Barchan != nil {
			t.Spec.Barchan.Aliases, t.Spec.Barchan.Public = slices.Clone(other.Spec.Barchan.Aliases), other.Spec.Barchan.Public
			break
		}
	}
	return t, nil
}
