package layers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Scripts for a POSIX shell, which an image must have.
const (
	// runScript runs its argument as E2B does, by a login shell.
	runScript = `if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; fi; exec /bin/sh -l -c "$1"`
	// prepareScript makes the user "user" where it is missing, with the tools of Debian, of BusyBox, or without any.
	prepareScript = `set -e
if grep -q '^user:' /etc/passwd 2>/dev/null; then mkdir -p /home/user; exit 0; fi
shell=/bin/sh; [ -x /bin/bash ] && shell=/bin/bash
if command -v useradd >/dev/null 2>&1; then useradd -m -s "$shell" user
elif command -v adduser >/dev/null 2>&1; then adduser -D -s "$shell" user
else
	id=1000; while cut -d: -f3,4 /etc/passwd | tr : '\n' | grep -qx "$id"; do id=$((id + 1)); done
	echo "user:x:$id:$id::/home/user:$shell" >>/etc/passwd; echo "user:x:$id:" >>/etc/group
	mkdir -p /home/user; chown "$id:$id" /home/user
fi
if [ -d /etc/sudoers.d ]; then echo 'user ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/user; chmod 0440 /etc/sudoers.d/user; fi`
	// workdirScript makes a directory; one that it makes is the user's.
	workdirScript = `set -e; [ -d "$1" ] && exit 0; mkdir -p -- "$1"; [ -z "$2" ] || chown -- "$2:" "$1" 2>/dev/null || chown -- "$2" "$1"`
	// copyScript unpacks an archive, and moves what its source names, which may have wildcards, to the destination.
	copyScript = `set -e
archive=$1 source=$2 dest=$3 owner=$4 mode=$5
tree=$archive.d; mkdir -- "$tree"
tar -xzf "$archive" -C "$tree"
cd -- "$tree"
source=${source#./}; source=${source%/}; IFS=
case $source in '' | .) set -- . ;; *) set -- $source ;; esac
[ -e "$1" ] || [ -L "$1" ] || { echo "the archive has no $source" >&2; exit 1; }
[ $# -eq 1 ] || case $dest in */) ;; *) dest=$dest/ ;; esac
for from; do
	[ -z "$owner" ] || chown -hR -- "$owner" "$from"
	[ -z "$mode" ] || chmod -R -- "$mode" "$from"
	if [ -d "$from" ] && [ ! -L "$from" ] && [ $# -eq 1 ] && [ ! -d "$dest" ]; then
		dest=${dest%/}
		mkdir -p -- "$(dirname -- "$dest")"
		cp -a -- "$from" "$dest"
	elif [ -d "$from" ] && [ ! -L "$from" ] && [ $# -eq 1 ]; then # whose own mode and owner stay
		for entry in "$from"/* "$from"/.[!.]* "$from"/..?*; do
			if [ -e "$entry" ] || [ -L "$entry" ]; then cp -a -- "$entry" "$dest"; fi
		done
	else
		case $dest in
		*/) mkdir -p -- "$dest" ;;
		*) mkdir -p -- "$(dirname -- "$dest")" ;;
		esac
		cp -a -- "$from" "$dest"
	fi
done
cd /; rm -rf -- "$tree" "$archive"`
)

// runLayer runs the steps of a layer in a sandbox and keeps the files.
func (w *Work) runLayer(ctx context.Context, l *layer) error {
	w.Log.Step = w.step(barchan.BuildStepBase)
	if len(l.steps) > 0 {
		w.Log.Step = w.stepNumber(l.first)
	}
	in, err := w.inputs(ctx, l)
	if err != nil {
		return err
	}
	defer in.release()
	w.settings = l.before
	s, err := w.start(ctx, in.blueprint, in.policies)
	if err != nil {
		return err
	}
	defer w.remove(ctx, s)
	if len(l.steps) == 0 {
		w.Log.Say(builds.LevelInfo, "preparing the image")
		if err := w.script(ctx, s, "prepare the image", prepareScript); err != nil {
			return err
		}
	}
	for i := range l.steps {
		step := &l.steps[i]
		w.Log.Step = w.stepNumber(l.first + i)
		if w.stage == "" {
			status := w.Build.Status.DeepCopy()
			status.Step = int32(l.first + i + 1) //nolint:gosec // at most 256
			if err := w.call.Write(ctx, status); err != nil {
				return err
			}
		}
		w.Log.Say(builds.LevelInfo, "%s", textOf(step))
		if err := w.runStep(ctx, s, step, in); err != nil {
			return err
		}
	}
	c, err := w.keep(ctx, s, l.checkpoint(), barchan.ContentFiles)
	if err != nil {
		return err
	}
	w.checkpoint, w.settings = c.Name, l.after
	return nil
}

// runStep runs one step, and applies what it sets.
func (w *Work) runStep(ctx context.Context, s *started, step *barchan.BuildStep, in *inputs) error {
	ctx, stop := context.WithTimeoutCause(ctx, stepTimeout, buildlog.Refuse(w.Log.Step, "the step took longer than %s", stepTimeout))
	defer stop()
	var err error
	switch step.Type {
	case barchan.StepRun:
		user := w.settings.User
		if len(step.Args) > 1 && step.Args[1] != "" {
			user = step.Args[1]
		}
		err = w.runMounted(ctx, s, user, step, in)
	case barchan.StepCopy:
		err = w.copy(ctx, s, step, in.files)
	case barchan.StepWorkdir:
		dir := absolute(step.Args[0], w.settings.Workdir)
		err = w.script(ctx, s, fmt.Sprintf("make directory '%s'", dir), workdirScript, dir, w.settings.User)
	case barchan.StepUser:
		// E2B runs whoami, which fails for an ID that has no name.
		err = w.program(ctx, s, step.Args[0], "run command 'whoami'", w.settings.Workdir, nil, runScript, ":")
	case barchan.StepEnv:
	}
	w.settings = w.settings.with(step)
	return err
}

// command runs a command of a user, with more variables, and with the error's text as clients of E2B know it.
func (w *Work) command(ctx context.Context, s *started, user, command string, env map[string]string) error {
	return w.program(ctx, s, user, fmt.Sprintf("run command '%s'", command), w.settings.Workdir, env, runScript, command)
}

// script runs a script of ours as root.
func (w *Work) script(ctx context.Context, s *started, what, script string, args ...string) error {
	return w.program(ctx, s, rootUser, what, "/", nil, script, args...)
}

func (w *Work) program(ctx context.Context, s *started, user, what, dir string, more map[string]string, script string, args ...string) error {
	agent, err := w.r.Agents.AgentAs(s.Sandbox, user)
	if err != nil {
		return err
	}
	out, trouble := w.Log.Output(builds.LevelInfo), w.Log.Output(builds.LevelWarn)
	defer out.Flush()
	defer trouble.Flush()
	env := map[string]string{}
	maps.Copy(env, w.settings.Env)
	maps.Copy(env, more)
	shown := w.showLog(ctx)
	exit, err := agent.Exec(ctx, shell(script, args...), envd.ExecOptions{Stdout: out, Stderr: trouble, Env: env, Dir: dir})
	shown()
	if err != nil {
		return w.agentError(ctx, s, what, err)
	}
	if exit != 0 {
		return buildlog.Refuse(w.Log.Step, "failed to %s: command failed: exit status %d", what, exit)
	}
	return nil
}

// endTime is how long a build waits for the news that the sandbox of a command has ended.
const endTime = 5 * time.Second

// agentError tells an agent's refusal, and the end of its sandbox, which another attempt would meet too, from a fault on the way to it.
func (w *Work) agentError(ctx context.Context, s *started, what string, err error) error {
	if f, is := errors.AsType[*buildlog.Failure](context.Cause(ctx)); is {
		return f
	}
	if ctx.Err() != nil {
		return err
	}
	if c, is := errors.AsType[*connect.Error](err); is {
		switch c.Code() { //nolint:exhaustive // all others may pass
		case connect.CodeUnauthenticated, connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodePermissionDenied:
			return buildlog.Refuse(w.Log.Step, "failed to %s: command failed: %s", what, c.Error())
		}
	}
	if why := w.endOf(ctx, s); why != "" { // such as one without memory
		return buildlog.Refuse(w.Log.Step, "failed to %s: its sandbox has ended: %s", what, why)
	}
	return fmt.Errorf("%s: %w: %w", what, err, errs.ErrUnavailable)
}

// endOf returns why a sandbox has ended; empty if it has not.
func (w *Work) endOf(ctx context.Context, s *started) (why string) {
	ctx, stop := context.WithTimeout(ctx, endTime)
	defer stop()
	_, _ = w.r.Objects.WaitSandbox(ctx, client.ObjectKeyFromObject(s), func(now *agents.Sandbox) (bool, error) { // it runs if the time ends
		if now != nil && now.UID == s.UID && sandbox.PhaseOf(now) == sandbox.Dead {
			_, why, _ = sandbox.Failure(now)
			why = cmp.Or(why, "no reason is known")
		}
		return why != "" || now == nil, nil
	})
	return why
}

// copy copies the files of an archive. Without an owner uploaded ones are the current user's, and those of a stage stay as they are.
func (w *Work) copy(ctx context.Context, s *started, step *barchan.BuildStep, archive string) error {
	args := append(append([]string(nil), step.Args...), "", "")[:4]
	dest := absolute(args[1], w.settings.Workdir)
	if strings.HasSuffix(args[1], "/") || path.Base(args[1]) == "." {
		dest = strings.TrimSuffix(dest, "/") + "/"
	}
	source, owner := args[0], args[2]
	if step.From != nil {
		file, err := w.onlyFile(archive)
		if err != nil {
			return err
		}
		source = cmp.Or(file, ".")
	} else if owner == "" {
		owner = w.settings.User
	}
	return w.unpack(ctx, s, fmt.Sprintf("copy '%s' to '%s'", args[0], args[1]), archive, source, dest, owner, args[3])
}

// unpack moves what source names in an archive to its destination, by the sandbox's own programs.
func (w *Work) unpack(ctx context.Context, s *started, what, archive, source, dest, owner, mode string) error {
	files, err := w.r.Store.Files(w.Build.Namespace, archive)
	if errors.Is(err, errs.ErrNotFound) {
		return buildlog.Refuse(w.Log.Step, "the files of the step are not there any more; build again, or upload them again")
	} else if err != nil {
		return err
	}
	defer func() { _ = files.Close() }()
	agent, err := w.r.Agents.AgentAs(s.Sandbox, rootUser)
	if err != nil {
		return err
	}
	to := "/tmp/.barchan-" + archive[:16] + ".tar.gz"
	if _, err := agent.Upload(ctx, to, io.Reader(files), nil); err != nil {
		return w.agentError(ctx, s, "copy files", err)
	}
	return w.script(ctx, s, what, copyScript, to, source, dest, owner, mode)
}

// textOf returns a step as a line of a Dockerfile.
func textOf(step *barchan.BuildStep) string {
	args := step.Args
	switch step.Type {
	case barchan.StepRun:
		args = args[:1]
	case barchan.StepCopy:
		args = args[:2]
		if step.From != nil {
			args = slices.Concat([]string{"--from=" + step.From.Stage, args[0]}, step.From.Paths, args[1:])
		}
	case barchan.StepEnv:
		var pairs []string
		for i := 0; i+1 < len(args); i += 2 {
			pairs = append(pairs, args[i]+"="+strconv.Quote(args[i+1]))
		}
		args = pairs
	case barchan.StepUser, barchan.StepWorkdir:
	}
	return strings.ToUpper(string(step.Type)) + " " + strings.Join(args, " ")
}
