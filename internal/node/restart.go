package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Pauses between restarts of one sandbox: the first at once, then growing, until one lasts.
const (
	firstRestartPause = time.Second
	longRestartPause  = 5 * time.Minute
	soundRestart      = 10 * time.Minute
	// entrypointRetry is the pause before the agent's log is followed again.
	entrypointRetry = time.Second
)

// What the end of the template's program means, by its restartPolicy:
//
//	unset       nothing: a sandbox is a computer, which lives on; the exit code is seen
//	Always      the container is restarted, keeping its files, address and volumes
//	OnFailure   the same after a failure; after success the sandbox has ended
//	Never       the sandbox has ended
//
// A liveness or startup probe that fails restarts the container, unless the policy is Never.
//
// The end of the sandbox's kernel, or of the agent, its first process, is another thing: memory
// is lost, and no program has said so. By the policy:
//
//	Always, OnFailure   the container is restarted, keeping its files, address and volumes; one
//	                    that slept in memory runs then, and whoever wants it asleep suspends it
//	Never, unset        the sandbox has ended: whoever set no policy was promised no second life,
//	                    and must not find an empty memory where there was a full one
//
// So it is too where a sandbox died while the server was down, or the machine was rebooted.

// followEntrypoint learns of the end of the template's program from the agent's log, whose
// every line is a reason to ask.
func (n *Node) followEntrypoint(ctx context.Context, u *registry.Handle, r *journal.Row) {
	for r.Program && ctx.Err() == nil {
		agent, err := n.host.AgentOf(u.ID, r.Address)
		if err != nil {
			return
		}
		state, err := agent.Entrypoint(ctx)
		if err == nil && n.entrypointEnded(ctx, u, r, state) {
			return
		}
		// A line may have come before the first question and be read after it: no gap.
		err = agent.Logs(ctx, envd.SourceAgent, true, func(envd.LogLine) error {
			state, err := agent.Entrypoint(ctx)
			if err == nil && n.entrypointEnded(ctx, u, r, state) {
				return errEnded
			}
			return err
		})
		if errors.Is(err, errEnded) || !lifecycle.Sleep(ctx, entrypointRetry) {
			return
		}
	}
}

var errEnded = errors.New("the entrypoint has ended")

// entrypointEnded acts on the end of the template's program, and reports whether it has ended.
func (n *Node) entrypointEnded(ctx context.Context, u *registry.Handle, r *journal.Row, state envd.Entrypoint) bool {
	if state.Running || (state.ExitCode == nil && state.Error == "") {
		return false
	}
	code := int32(127) // could not be started, as shells say it
	if state.ExitCode != nil {
		code = int32(*state.ExitCode)
	}
	why := fmt.Sprintf("its entrypoint ended with code %d", code)
	if state.Error != "" {
		why += ": " + state.Error
	}
	switch policy := r.Plan.Restart; {
	case policy == corev1.RestartPolicyAlways, policy == corev1.RestartPolicyOnFailure && code != 0:
		n.restart(ctx, u, r, why)
	case policy == corev1.RestartPolicyNever, policy == corev1.RestartPolicyOnFailure:
		n.end(ctx, u, r, &code, why)
	default:
		if u.Update(func(o *sandbox.Observed) { o.EntrypointExit = &code }) {
			n.dirty.Mark(u.Ref)
		}
	}
	return true
}

// unwell acts on a probe that says that the sandbox cannot be helped as it is.
func (n *Node) unwell(ctx context.Context, u *registry.Handle, r *journal.Row, why string) {
	if r.Plan.Restart == corev1.RestartPolicyNever {
		n.end(ctx, u, r, nil, why)
		return
	}
	n.restart(ctx, u, r, why)
}

// died acts on the end of a sandbox's kernel or first process, which nobody asked for.
func (n *Node) died(ctx context.Context, u *registry.Handle, r *journal.Row, why string) {
	if p := r.Plan.Restart; p == corev1.RestartPolicyAlways || p == corev1.RestartPolicyOnFailure {
		n.restart(ctx, u, r, why)
		return
	}
	n.end(ctx, u, r, nil, why)
}

// restart replaces the container of a sandbox; the next pause is longer if this one did not last.
func (n *Node) restart(ctx context.Context, u *registry.Handle, r *journal.Row, why string) {
	pause := r.Pause
	if time.Since(r.StartedAt) > soundRestart {
		pause = 0
	}
	n.log.InfoContext(ctx, "sandbox is restarted", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		telemetry.Reason, why, "pause", pause)
	_, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	now := u.Row()
	if ctx.Err() != nil || u.IsRemoved() || now == nil || now.Process != r.Process || !restartable(now) {
		return
	}
	changed := *now
	changed.Ready, changed.PausedAt = false, time.Time{}
	changed.Pause = min(max(2*pause, firstRestartPause), longRestartPause)
	u.SetStore(nil)
	n.seeRestart(u, why)
	if err := n.handles.Note(u, &changed, journal.Restarting); err != nil { // noted with the first try
		n.log.ErrorContext(ctx, "restart not noted yet", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		changed.Stage = journal.Restarting
		u.SetRow(&changed)
	}
	n.restartLater(u, &changed, pause)
}

// restartable reports whether a container may be replaced: one that is awake, or asleep in a
// memory that is gone.
func restartable(r *journal.Row) bool {
	asleep := r.Stage == journal.Pausing || r.Stage == journal.Paused || r.Stage == journal.Resuming
	return r.Stage == journal.Live || (asleep && !r.Process.Alive())
}

// seeRestart makes seen that the container of a sandbox is being replaced.
func (n *Node) seeRestart(u *registry.Handle, why string) {
	changed := u.Update(func(o *sandbox.Observed) {
		o.State, o.Probed, o.Message = sandbox.ContainerRunning, false, why+"; it is restarted"
	})
	if changed {
		n.dirty.Mark(u.Ref)
	}
}

// restartLater has Run replace the container after a pause, and try until it lives or is
// taken away.
func (n *Node) restartLater(u *registry.Handle, r *journal.Row, pause time.Duration) {
	ending := make(chan struct{})
	u.SetWatch(sync.OnceFunc(func() { close(ending) }))
	n.tasks.Start(func(ctx context.Context) {
		for {
			select {
			case <-ending:
				return
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			if n.restartNow(ctx, u, r) {
				return
			}
			pause = min(max(2*pause, firstRestartPause), longRestartPause)
		}
	})
}

// restartNow replaces the container, and reports whether there is no more to do.
func (n *Node) restartNow(ctx context.Context, u *registry.Handle, r *journal.Row) (finished bool) {
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return true
	}
	defer done()
	now := u.Row()
	if u.IsRemoved() || now == nil || now.Stage != journal.Restarting || now.Process != r.Process {
		return true
	}
	w := n.host.Operation(new(*now))
	if err := w.Restart(ctx); err != nil {
		n.log.WarnContext(ctx, "sandbox not restarted yet", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return false
	}
	if err := n.handles.Note(u, w.Row, journal.Live); err != nil {
		n.log.ErrorContext(ctx, "restart not noted", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return false
	}
	n.setRunning(u, w.Row)
	n.dirty.Mark(u.Ref)
	return true
}
