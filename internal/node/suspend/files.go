package suspend

import (
	"context"
	"fmt"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// suspendToFiles ends the processes of a running sandbox, and keeps its files or its claims.
func (p *Suspender) suspendToFiles(ctx context.Context, u *registry.Handle, r *journal.Row, mode agents.SuspendMode) error {
	began := time.Now()
	w := p.cfg.Host.Operation(new(*r))
	if err := w.SaveFiles(ctx); err != nil {
		return err
	}
	w.Row.PausedAt = time.Now()
	if err := p.decide(w, u, mode); err != nil {
		return err
	}
	if err := w.After("decided"); err != nil {
		return err
	}
	p.cfg.ObserveStep(string(r.Plan.Class), "decide", time.Since(began))
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err := p.Release(whole, w, u)
	if err == nil {
		u.Finished(w.Status(agents.OperationSuspend))
	}
	p.cfg.Changes.Mark(u.Ref) // also after a failure, which is retried later
	if err != nil {
		return err
	}
	p.cfg.Log.InfoContext(ctx, "sandbox suspended without its memory", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		"keeps", mode, telemetry.Duration, time.Since(began))
	return nil
}

// decide writes to the journal that a sandbox is what the mode keeps. From then on its processes and memory are garbage.
func (p *Suspender) decide(w *operation.Operation, u *registry.Handle, mode agents.SuspendMode) error {
	changed := *w.Row
	changed.Kept, changed.Memory, changed.Ready = mode, nil, false
	changed.Process = lifecycle.Process{} // the watch must not report the end of the container
	if err := p.note(w, u, &changed, journal.Storing); err != nil {
		return err
	}
	u.SetWatch(nil)
	u.SetStore(nil)
	*w.Row = changed
	p.setStored(u, w.Row)
	return nil
}

// setStored shows a sandbox as paused on disk.
func (p *Suspender) setStored(u *registry.Handle, r *journal.Row) {
	u.Update(func(o *sandbox.Observed) {
		if r.KeepsClaims() {
			done := o.Operations
			*o = p.cfg.Absent()
			o.Operations = done
		} else {
			o.State, o.Address = sandbox.ContainerPaused, r.Address
		}
		setKept(o, r)
		if r.Memory != nil {
			o.EntrypointExit = r.Memory.Exit
		}
	})
}

// Recreate creates a sandbox of which only the volume claims are left, by a new plan.
func (p *Suspender) Recreate(ctx context.Context, u *registry.Handle, r *journal.Row, by plan.Plan) error {
	changed := *r
	changed.Plan = by
	if err := p.wake(ctx, u, &changed, false); err != nil {
		return fmt.Errorf("create sandbox %s/%s again: %w", by.Ref.Namespace, by.Ref.Name, err)
	}
	return nil
}
