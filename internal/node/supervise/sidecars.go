package supervise

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/probe"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// The program of a sidecar is started again by the agent in its container, so its end changes nothing on the host: this
// shows it, and runs the probes of each run of the program.

// startedSidecars are the states of sidecars at the start of a sandbox, or of the server.
func startedSidecars(r *journal.Row) *sandbox.Sidecars {
	if len(r.Plan.Sidecars) == 0 {
		return nil
	}
	all := sandbox.Sidecars{}
	for _, c := range r.Plan.Sidecars {
		all = append(all, agents.ContainerStatus{
			Name: c.Name, Image: r.Sidecars[c.Name].Digest, Ready: c.Readiness == nil && c.Startup == nil,
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(r.StartedAt.Truncate(time.Second))}},
		})
	}
	return &all
}

// sidecar follows one sidecar of a running sandbox.
type sidecar struct {
	*Supervisor
	u     *registry.Handle
	r     *journal.Row
	c     *plan.Container
	index int

	mu    sync.Mutex
	run   envd.Entrypoint // +checklocksignore: with mu held, by change
	ready bool            // +checklocksignore: as run
	lost  string          // why its agent does not answer; +checklocksignore: as run
}

// followSidecars follows all sidecars until ctx ends.
func (s *Supervisor) followSidecars(ctx context.Context, u *registry.Handle, r *journal.Row) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for i := range r.Plan.Sidecars {
		x := &sidecar{Supervisor: s, u: u, r: r, c: &r.Plan.Sidecars[i], index: i}
		wg.Go(func() { x.follow(ctx) })
	}
}

func (x *sidecar) client() (*envd.Client, error) {
	return x.cfg.Host.SidecarOf(x.u.ID, x.r.Address, x.c.Name)
}

// follow shows the states of the program.
func (x *sidecar) follow(ctx context.Context) {
	probing := func() {}
	defer func() { probing() }()
	agent, err := x.client()
	if err != nil {
		x.cfg.Log.ErrorContext(ctx, "container not watched", telemetry.Sandbox, x.u.Ref.Name, telemetry.Error, err)
		return
	}
	limit := rate.NewLimiter(changesPerSecond, changesAtOnce) // each may become a write of the object
	for ctx.Err() == nil {
		_, err := agent.WatchEntrypoint(ctx, func(state envd.Entrypoint) bool {
			if limit.Wait(ctx) == nil && x.sees(state) {
				probing()
				probing = x.probe(ctx)
			}
			return false
		})
		if refused, ok := errors.AsType[*envd.Error](err); ok && refused.Status == http.StatusBadGateway {
			x.change(func() { x.lost = refused.Message })
		}
		if !lifecycle.Sleep(ctx, entrypointRetry) {
			return
		}
	}
}

// changesPerSecond and changesAtOnce bound the states of a program that are shown.
const (
	changesPerSecond = 1
	changesAtOnce    = 20
)

// sees shows a state of the program, and reports whether it is that of another run.
func (x *sidecar) sees(state envd.Entrypoint) (another bool) {
	x.change(func() {
		was := x.run
		another = state.Running && (!was.Running || was.PID != state.PID || was.Restarts != state.Restarts)
		x.run, x.lost = state, ""
		if another || !state.Running {
			x.ready = false
		}
	})
	return another
}

// probe runs the probes of one run of the program until stop is called.
func (x *sidecar) probe(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		probe.Run(ctx, probe.Config{
			Startup: x.c.Startup, Readiness: x.c.Readiness, Liveness: x.c.Liveness, Address: x.r.Address, Agent: x.client,
			Running: func() bool { return x.u.Observed().State == sandbox.ContainerRunning },
			Ready: func(ok bool, _ string) {
				x.change(func() { x.ready = ok && ctx.Err() == nil })
			},
			Failed: func(why string) { x.unwell(ctx, why) },
		})
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// unwell ends the program, which its agent starts again.
func (x *sidecar) unwell(ctx context.Context, why string) {
	x.cfg.Log.InfoContext(ctx, "container restarting", telemetry.Namespace, x.u.Ref.Namespace, telemetry.Sandbox, x.u.Ref.Name,
		"container", x.c.Name, telemetry.Reason, why)
	agent, err := x.client()
	if err == nil {
		err = agent.Restart(ctx)
	}
	if err != nil && ctx.Err() == nil {
		x.cfg.Log.WarnContext(ctx, "container not restarted", telemetry.Sandbox, x.u.Ref.Name, "container", x.c.Name, telemetry.Error, err)
	}
}

// change changes what is known of the container, and shows it.
func (x *sidecar) change(what func()) {
	x.mu.Lock()
	what()
	status := x.statusLocked()
	x.mu.Unlock()
	changed := x.u.Update(func(o *sandbox.Observed) {
		if o.Sidecars == nil || x.index >= len(*o.Sidecars) || apiequality.Semantic.DeepEqual((*o.Sidecars)[x.index], status) {
			return
		}
		all := slices.Clone(*o.Sidecars)
		all[x.index] = status
		o.Sidecars = &all
	})
	if changed {
		x.cfg.Changes.Mark(x.u.Ref)
	}
}

// +checklocks:x.mu
func (x *sidecar) statusLocked() agents.ContainerStatus {
	run := &x.run
	s := agents.ContainerStatus{Name: x.c.Name, Image: x.r.Sidecars[x.c.Name].Digest, RestartCount: run.Restarts}
	if run.Last != nil {
		s.LastState.Terminated = terminated(run.Last)
	}
	switch {
	case x.lost != "":
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: sandbox.ReasonUnknown, Message: "its agent does not answer: " + x.lost}
	case run.Again != nil:
		ended := terminated(run)
		s.LastState.Terminated = ended
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: sandbox.ReasonCrashLoop, Message: fmt.Sprintf(
			"its program ended with code %d, and is started again at %s", ended.ExitCode, run.Again.UTC().Format(time.RFC3339))}
	case run.Running:
		s.State.Running = &corev1.ContainerStateRunning{StartedAt: atSecond(run.StartedAt)}
		s.Ready = x.ready
	case run.Ended():
		s.State.Terminated = terminated(run)
	default:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}
	}
	return s
}

// terminated describes the end of a run in kubelet's words.
func terminated(run *envd.Entrypoint) *corev1.ContainerStateTerminated {
	t := &corev1.ContainerStateTerminated{
		Reason: "Completed", Message: run.Error, StartedAt: atSecond(run.StartedAt), FinishedAt: atSecond(run.FinishedAt),
	}
	switch {
	case run.ExitCode == nil:
		t.ExitCode, t.Reason = 127, "StartError" // as shells report a program that cannot be started
	case *run.ExitCode != 0:
		t.ExitCode, t.Reason = int32(*run.ExitCode), "Error"
	}
	return t
}

func atSecond(at *time.Time) metav1.Time {
	return metav1.NewTime(cmp.Or(at, &time.Time{}).Truncate(time.Second))
}
