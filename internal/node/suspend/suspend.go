// Package suspend pauses sandboxes and resumes them, with or without memory, and moves the memory of paused ones to disk.
// Each flow writes its decision to the journal before it acts on it, so that the next process completes or undoes it.
// The package neither creates nor removes sandboxes.
//
// What a sandbox without memory goes through:
//
//	live ──────────→ storing → stored → waking → live
//	paused, stored ──↗ its memory is discarded
//
// Until the journal has the stage storing, the processes are the sandbox; from then on its files or its volume claims are,
// and the rest is garbage. A failed resume leads back to stored.
//
// Callers hold the lock of the sandbox, unless a method says otherwise.
package suspend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/programs"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// clockTimeout bounds the request that sets an agent's clock after a resume. A tenant may have replaced the agent.
const clockTimeout = 5 * time.Second

// Config is what New needs; every field is required unless it says so.
type Config struct {
	Log        *slog.Logger
	Host       *operation.Host
	Registry   *registry.Registry
	Runtimes   *programs.Runtimes
	Allocator  *ipam.Allocator
	MemoryDirs func() []string
	// StoreAfter is how long memory stays in RAM; 0 or less: until the sandbox is resumed or removed.
	StoreAfter time.Duration
	// MemoryLow reports whether memory shall not stay in RAM even so long; nil: never.
	MemoryLow func() bool
	// ReleaseAddresses releases the addresses of sandboxes on disk.
	ReleaseAddresses bool
	// Absent is what is observed of a sandbox that the host does not have.
	Absent func() sandbox.Observed
	// SetRunning shows a sandbox as running, and watches its container.
	SetRunning func(u *registry.Handle, r *journal.Row)
	// Changes gets sandboxes that changed without a request.
	Changes *registry.ChangeQueue
	// Refuse returns why the node accepts no new work, or nil.
	Refuse func() error
	// Later runs a function in the background until the node stops.
	Later func(func(context.Context))
	// ObserveStep records the duration of a step.
	ObserveStep func(class, step string, took time.Duration)
}

// Suspender pauses and resumes sandboxes. Make it with New.
type Suspender struct {
	// StoreAfter is that of Config. Tests change it between calls.
	StoreAfter time.Duration

	cfg   Config
	slots chan struct{} // has an element for each memory that is being moved to disk
}

// New starts nothing.
func New(cfg Config) *Suspender {
	return &Suspender{StoreAfter: cfg.StoreAfter, cfg: cfg, slots: make(chan struct{}, maxConcurrentStores)}
}

// Suspend pauses a sandbox with what the mode keeps; see node.Node.Suspend.
func (p *Suspender) Suspend(ctx context.Context, u *registry.Handle, r *journal.Row, mode agents.SuspendMode) error {
	mode = cmp.Or(mode, agents.SuspendMemory)
	if mode == agents.SuspendMemory && r.Plan.Class != oci.GVisor {
		mode = agents.SuspendFiles
	}
	if r.Stage == journal.Pausing && mode != agents.SuspendMemory {
		p.Settle(ctx, u, r) // of an earlier request whose result was lost
		if r = u.Row(); r.Stage == journal.Paused {
			p.SetPaused(u, r)
		}
	}
	switch {
	case r.Stage == journal.Paused || r.OnDisk():
		return nil
	case r.Stage == journal.Live && mode != agents.SuspendMemory:
		return p.suspendToFiles(ctx, u, r, mode)
	case r.Stage != journal.Live && r.Stage != journal.Pausing:
		return fmt.Errorf("it is %s: %w", r.Stage, errs.ErrConflict)
	}
	return p.freezeOrThaw(ctx, u, r, transition{journal.Pausing, agents.OperationSuspend, p.freeze})
}

// Resume continues a paused sandbox; see node.Node.Resume.
func (p *Suspender) Resume(ctx context.Context, u *registry.Handle, r *journal.Row, filesOnly bool) error {
	switch {
	case r.Stage == journal.Live:
		return nil
	case r.OnDisk(), filesOnly && (r.Stage == journal.Paused || r.Stage == journal.Resuming):
		return p.wake(ctx, u, r, filesOnly)
	case r.Stage != journal.Paused && r.Stage != journal.Resuming:
		return fmt.Errorf("it is %s: %w", r.Stage, errs.ErrConflict)
	}
	return p.freezeOrThaw(ctx, u, r, transition{journal.Resuming, agents.OperationResume, p.thaw})
}

// transition is a freeze or a thaw: the stage that announces it, and what changes a copy of the row.
type transition struct {
	by journal.Stage
	op agents.OperationType
	do func(context.Context, *oci.Runtime, *registry.Handle, *operation.Operation) error
}

// freezeOrThaw writes a stage to the journal and then carries it out. After a failure it reads the state from the runtime.
func (p *Suspender) freezeOrThaw(ctx context.Context, u *registry.Handle, r *journal.Row, t transition) error {
	runtime, err := p.cfg.Runtimes.Driving(r.Plan.Class, r.Build)
	if err != nil {
		return operation.OrFiles(err)
	}
	w := p.cfg.Host.Operation(new(*r))
	if err := p.note(w, u, w.Row, t.by); err != nil {
		return err
	}
	if err := t.do(ctx, runtime, u, w); err != nil {
		p.Settle(context.WithoutCancel(ctx), u, w.Row)
		return err
	}
	u.Finished(w.Status(t.op))
	return nil
}

// note writes a row to the journal, as a step of an operation.
func (p *Suspender) note(w *operation.Operation, u *registry.Handle, r *journal.Row, stage journal.Stage) error {
	return w.Timed("journal", func() error { return p.cfg.Registry.Note(u, r, stage) })
}

// freeze pauses the processes of a sandbox.
func (p *Suspender) freeze(ctx context.Context, runtime *oci.Runtime, u *registry.Handle, w *operation.Operation) error {
	if err := w.Timed("freeze", func() error { return runtime.Pause(ctx, string(u.ID)) }); err != nil {
		return errs.Retryable(err)
	}
	failpoint.Reach("node/frozen")
	r := w.Row
	r.PausedAt = time.Now()
	if err := p.note(w, u, r, journal.Paused); err != nil {
		return err
	}
	p.SetPaused(u, r)
	return nil
}

// thaw resumes frozen processes.
func (p *Suspender) thaw(ctx context.Context, runtime *oci.Runtime, u *registry.Handle, w *operation.Operation) error {
	if err := w.Timed("thaw", func() error { return runtime.Resume(ctx, string(u.ID)) }); err != nil {
		return errs.Retryable(err)
	}
	failpoint.Reach("node/thawed")
	u.SetStore(nil)
	r := w.Row
	r.StartedAt, r.PausedAt = time.Now(), time.Time{}
	if err := p.note(w, u, r, journal.Live); err != nil {
		return err
	}
	u.Update(func(o *sandbox.Observed) {
		o.State, o.StartedAt, o.Message = sandbox.ContainerRunning, r.StartedAt, ""
		if !o.Probed {
			o.Message = probesNotAgain
		}
	})
	agent, err := p.cfg.Host.AgentOf(u.ID, r.Address)
	if err != nil {
		return err
	}
	now := time.Now()
	asked, cancel := context.WithTimeout(ctx, clockTimeout)
	defer cancel()
	err = w.Timed("agent", func() error { return agent.Init(asked, envd.InitRequest{Timestamp: &now}) })
	if err != nil && !errors.Is(err, context.Canceled) {
		p.cfg.Log.WarnContext(ctx, "agent clock not set after a resume", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
	return nil
}

// SetPaused shows a sandbox as paused, and schedules the move of its memory to disk.
func (p *Suspender) SetPaused(u *registry.Handle, r *journal.Row) {
	u.Update(func(o *sandbox.Observed) {
		o.State = sandbox.ContainerPaused
		setKept(o, r)
	})
	p.storeLater(u, r)
}

// Settle reads from the runtime whether a sandbox is paused, and writes that to the journal.
func (p *Suspender) Settle(ctx context.Context, u *registry.Handle, r *journal.Row) {
	became := journal.Live
	r = new(*r) // readers share the handle's row
	runtime, err := p.cfg.Runtimes.Driving(r.Plan.Class, r.Build)
	if err == nil {
		var status oci.Status
		if status, err = runtime.State(ctx, string(u.ID)); status == oci.Paused {
			became = journal.Paused
		}
	}
	if err == nil {
		if became == journal.Paused && r.PausedAt.IsZero() {
			r.PausedAt = time.Now()
		}
		err = p.cfg.Registry.Note(u, r, became)
	}
	if err != nil {
		p.cfg.Log.WarnContext(ctx, "sandbox state unknown", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}
