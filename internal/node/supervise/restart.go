package supervise

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

const (
	// The first restart of a sandbox is immediate. Pauses then double from minRestartPause to maxRestartPause, until a
	// container has run for stableAfter.
	minRestartPause = time.Second
	maxRestartPause = 5 * time.Minute
	stableAfter     = 10 * time.Minute
	// entrypointRetry is the pause before the agent's log is followed again.
	entrypointRetry = time.Second
)

// What the end of the template's program means, by its restartPolicy:
//
//	unset       nothing: the sandbox keeps running; the exit code is shown
//	Always      the container is restarted, keeping its files, address and volumes
//	OnFailure   the same after a failure; after success the sandbox has ended
//	Never       the sandbox has ended
//
// A liveness or startup probe that fails restarts the container, unless the policy is Never.
//
// When the sandbox's kernel or the agent, its first process, ends, memory is lost. By the policy:
//
//	Always, OnFailure   the container is restarted, keeping its files, address and volumes. One that was paused
//	                    in memory then runs, until its controller suspends it again
//	Never, unset        the sandbox has ended: a user without a policy must not find an empty memory
//
// The same applies to a sandbox that ended while the server was down, or by a reboot.

// followEntrypoint waits for the end of the template's program.
func (s *Supervisor) followEntrypoint(ctx context.Context, u *registry.Handle, r *journal.Row) {
	for r.Program && ctx.Err() == nil {
		agent, err := s.cfg.Host.AgentOf(u.ID, r.Address)
		if err != nil {
			return
		}
		if state, err := agent.AwaitEntrypoint(ctx); err == nil {
			s.entrypointEnded(ctx, u, r, state)
			return
		}
		if !lifecycle.Sleep(ctx, entrypointRetry) {
			return
		}
	}
}

// entrypointEnded acts on the end of the template's program.
func (s *Supervisor) entrypointEnded(ctx context.Context, u *registry.Handle, r *journal.Row, state envd.Entrypoint) {
	code := int32(127) // as shells report a program that cannot be started
	if state.ExitCode != nil {
		code = int32(*state.ExitCode)
	}
	why := fmt.Sprintf("its entrypoint ended with code %d", code)
	if state.Error != "" {
		why += ": " + state.Error
	}
	switch policy := r.Plan.Restart; {
	case policy == corev1.RestartPolicyAlways, policy == corev1.RestartPolicyOnFailure && code != 0:
		s.restart(ctx, u, r, why)
	case policy == corev1.RestartPolicyNever, policy == corev1.RestartPolicyOnFailure:
		s.end(ctx, u, r, &code, why)
	default:
		if u.Update(func(o *sandbox.Observed) { o.EntrypointExit = &code }) {
			s.cfg.Changes.Mark(u.Ref)
		}
	}
}

// unwell acts on a failed liveness or startup probe.
func (s *Supervisor) unwell(ctx context.Context, u *registry.Handle, r *journal.Row, why string) {
	if r.Plan.Restart == corev1.RestartPolicyNever {
		s.end(ctx, u, r, nil, why)
		return
	}
	s.restart(ctx, u, r, why)
}

// Died acts on the unexpected end of a sandbox's kernel or first process.
func (s *Supervisor) Died(ctx context.Context, u *registry.Handle, r *journal.Row, why string) {
	if p := r.Plan.Restart; p == corev1.RestartPolicyAlways || p == corev1.RestartPolicyOnFailure {
		s.restart(ctx, u, r, why)
		return
	}
	s.end(ctx, u, r, nil, why)
}

// restart replaces the container of a sandbox, after a pause.
func (s *Supervisor) restart(ctx context.Context, u *registry.Handle, r *journal.Row, why string) {
	pause := r.Pause
	if time.Since(r.StartedAt) > stableAfter {
		pause = 0
	}
	s.cfg.Log.InfoContext(ctx, "sandbox restarting", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
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
	changed.Pause = min(max(2*pause, minRestartPause), maxRestartPause)
	u.SetStore(nil)
	s.SeeRestart(u, why)
	if err := s.cfg.Registry.Note(u, &changed, journal.Restarting); err != nil { // restartNow writes it
		s.cfg.Log.ErrorContext(ctx, "restart not written to the journal yet", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		changed.Stage = journal.Restarting
		u.SetRow(&changed)
	}
	s.RestartLater(u, &changed, pause)
}

// restartable reports whether a container may be replaced: a running one, or a frozen one whose process has ended.
func restartable(r *journal.Row) bool {
	frozen := r.Stage == journal.Pausing || r.Stage == journal.Paused || r.Stage == journal.Resuming
	return r.Stage == journal.Live || (frozen && !r.Process.Alive())
}

// SeeRestart shows that the container of a sandbox is being replaced.
func (s *Supervisor) SeeRestart(u *registry.Handle, why string) {
	changed := u.Update(func(o *sandbox.Observed) {
		o.State, o.Probed, o.Message = sandbox.ContainerRunning, false, why+"; it is restarted"
	})
	if changed {
		s.cfg.Changes.Mark(u.Ref)
	}
}

// RestartLater replaces the container in the background after a pause. It retries until the container runs or the sandbox is
// removed.
func (s *Supervisor) RestartLater(u *registry.Handle, r *journal.Row, pause time.Duration) {
	ending := make(chan struct{})
	u.SetWatch(sync.OnceFunc(func() { close(ending) }))
	s.cfg.Later(func(ctx context.Context) {
		for {
			select {
			case <-ending:
				return
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			if s.restartNow(ctx, u, r) {
				return
			}
			pause = min(max(2*pause, minRestartPause), maxRestartPause)
		}
	})
}

// restartNow replaces the container, and reports whether nothing is left to do.
func (s *Supervisor) restartNow(ctx context.Context, u *registry.Handle, r *journal.Row) (finished bool) {
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return true
	}
	defer done()
	now := u.Row()
	if u.IsRemoved() || now == nil || now.Stage != journal.Restarting || now.Process != r.Process {
		return true
	}
	w := s.cfg.Host.Operation(new(*now))
	if err := w.Restart(ctx); err != nil {
		s.cfg.Log.WarnContext(ctx, "sandbox not restarted yet", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return false
	}
	if err := s.cfg.Registry.Note(u, w.Row, journal.Live); err != nil {
		s.cfg.Log.ErrorContext(ctx, "restart not written to the journal", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return false
	}
	s.SetRunning(u, w.Row)
	u.Finished(w.Status(agents.OperationRestart))
	s.cfg.Changes.Mark(u.Ref)
	return true
}
