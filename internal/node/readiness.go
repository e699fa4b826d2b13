package node

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
func (n *Node) probe(ctx context.Context, u *registry.Handle, r *journal.Row) {
	p := &r.Plan
	probe.Run(ctx, probe.Config{
		Startup: p.Startup, Readiness: p.Readiness, Liveness: p.Liveness, Started: r.Ready, Address: r.Address,
		Agent:   func() (*envd.Client, error) { return n.host.AgentOf(u.ID, r.Address) },
		Running: func() bool { return u.Observed().State == sandbox.ContainerRunning },
		Ready:   func(ok bool, why string) { n.setReady(ctx, u, r, ok, why) },
		Failed:  func(why string) { n.unwell(ctx, u, r, why) },
	})
}

// setReady shows whether a sandbox is ready, and writes it to the journal.
func (n *Node) setReady(ctx context.Context, u *registry.Handle, r *journal.Row, ok bool, why string) {
	changed := u.Update(func(o *sandbox.Observed) {
		if o.State != sandbox.ContainerExited {
			o.Probed = ok
		}
		if o.State == sandbox.ContainerRunning {
			o.Message = why
		}
	})
	if changed {
		n.dirty.Mark(u.Ref)
	}
	if r.Plan.Probed() {
		n.noteReady(ctx, u, r, ok)
	}
}

// noteReady writes the result of the probes to the journal. A failure costs no more than a moment of being
// not ready after the next start of the server.
func (n *Node) noteReady(ctx context.Context, u *registry.Handle, r *journal.Row, ok bool) {
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
	if err := n.handles.Note(u, &changed, journal.Live); err != nil {
		n.log.WarnContext(ctx, "readiness not written to the journal", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}
