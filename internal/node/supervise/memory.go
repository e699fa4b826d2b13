package supervise

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/oom"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// reasonOOMKilled is of the Event of a killed process; kubelet's for a container is the same.
const reasonOOMKilled = "OOMKilled"

// holdTimeout bounds a signal to all processes of a sandbox.
const holdTimeout = 10 * time.Second

// guardMemory has processes of a gVisor sandbox killed when they reach its limit. The host's kernel does it for class runc,
// and where this cannot: it then ends the sandbox.
func (s *Supervisor) guardMemory(ctx context.Context, u *registry.Handle, r *journal.Row) {
	if r.Plan.Class != oci.GVisor {
		return
	}
	limit, err := cgroups.OpenOOM(s.cfg.Host.Cgroup(string(r.Plan.ID)), r.Plan.Limits.Memory)
	if errors.Is(err, errors.ErrUnsupported) {
		return
	}
	if err == nil {
		defer func() { _ = limit.Close() }()
		guard := &oom.Guard{
			Limit: limit,
			Kill: func(ctx context.Context) (envd.OOMKilled, error) {
				agent, err := s.cfg.Host.AgentOf(u.ID, r.Address)
				if err != nil {
					return envd.OOMKilled{}, err
				}
				return agent.OOMKill(ctx)
			},
			Hold:   func(ctx context.Context, stopped bool) error { return s.hold(ctx, r, stopped) },
			Killed: func(p envd.OOMKilled) { s.killed(ctx, u, r, p) },
		}
		err = guard.Run(ctx)
	}
	if ctx.Err() != nil {
		return
	}
	s.cfg.Log.WarnContext(ctx, "memory limit left to the kernel", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	if limit != nil {
		_ = limit.GiveUp() // the cgroup may be gone
	}
}

// hold stops the processes of a sandbox, except its agent, or continues them.
func (s *Supervisor) hold(ctx context.Context, r *journal.Row, stopped bool) error {
	runtime, err := s.cfg.Host.Runtime(r)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	if !stopped {
		return runtime.Continue(limited, string(r.Plan.ID))
	}
	if err := runtime.Stop(limited, string(r.Plan.ID)); err != nil { // the agent may be among those that are stopped
		return errors.Join(err, s.hold(context.WithoutCancel(ctx), r, false))
	}
	return nil
}

func (s *Supervisor) killed(ctx context.Context, u *registry.Handle, r *journal.Row, p envd.OOMKilled) {
	what, had := fmt.Sprintf("process %q (%d) was killed", p.Name, p.PID), "it"
	if p.Others > 0 {
		what, had = fmt.Sprintf("process %q (%d) and %d others of its session were killed", p.Name, p.PID, p.Others), "they"
	}
	text := fmt.Sprintf("%s: %s had %d MiB, and the sandbox has reached its limit of %d MiB", what, had, p.Bytes>>20, r.Plan.Limits.Memory>>20)
	s.cfg.Log.InfoContext(ctx, "process killed: out of memory", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name, "process", p.Name, "bytes", p.Bytes)
	s.cfg.OOMKills.Inc()
	s.cfg.Event(u.Ref, corev1.EventTypeWarning, reasonOOMKilled, text)
}
