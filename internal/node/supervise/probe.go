package supervise

import (
	"context"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/probe"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// probe runs the sandbox's probes until ctx ends.
func (s *Supervisor) probe(ctx context.Context, u *registry.Handle, r *journal.Row) {
	p := &r.Plan
	probe.Run(ctx, probe.Config{
		Startup: p.Startup, Readiness: p.Readiness, Liveness: p.Liveness, Started: r.Ready, Address: r.Address,
		Agent:   func() (*envd.Client, error) { return s.cfg.Host.AgentOf(u.ID, r.Address) },
		Running: func() bool { return u.Observed().State == sandbox.ContainerRunning },
		Ready:   func(ok bool, why string) { s.setReady(ctx, u, r, ok, why) },
		Failed:  func(why string) { s.unwell(ctx, u, r, why) },
	})
}

// setReady shows whether a sandbox is ready, and writes it to the journal.
func (s *Supervisor) setReady(ctx context.Context, u *registry.Handle, r *journal.Row, ok bool, why string) {
	changed := u.Update(func(o *sandbox.Observed) {
		if o.State != sandbox.ContainerExited {
			o.Probed = ok
		}
		if o.State == sandbox.ContainerRunning {
			o.Message = why
		}
	})
	if changed {
		s.cfg.Changes.Mark(u.Ref)
	}
	if r.Plan.Probed() {
		s.noteReady(ctx, u, r, ok)
	}
}

// noteReady writes the result of the probes to the journal. After a failure the
// sandbox is not ready for a moment after the next start of the server.
func (s *Supervisor) noteReady(ctx context.Context, u *registry.Handle, r *journal.Row, ok bool) {
	_, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	now := u.Row()
	if u.IsRemoved() || now == nil || now.Process != r.Process || now.Stage != journal.Live || now.Ready == ok {
		return
	}
	changed := *now
	changed.Ready = ok
	if err := s.cfg.Registry.Note(u, &changed, journal.Live); err != nil {
		s.cfg.Log.WarnContext(ctx, "readiness not written to the journal", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}
