// Package supervise watches running sandboxes: it waits for the end of their processes, runs their probes, follows their
// entrypoints, and restarts or ends them by their restart policy. It neither creates, suspends nor removes a sandbox.
//
// Lock order: it takes the lock of a sandbox for each change; callers of Died and RestartLater do not hold it.
package supervise

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

const (
	// watchRetry is the pause before another attempt to watch a process.
	watchRetry = time.Second
	// endTimeout bounds the removal of the processes of a sandbox that ended.
	endTimeout = time.Minute
)

// Config is what New needs; every field is required.
type Config struct {
	// Name is the node's name.
	Name     string
	Log      *slog.Logger
	Host     *operation.Host
	Registry *registry.Registry
	// Changes gets sandboxes that changed without a request.
	Changes *registry.ChangeQueue
	// Cut resets the connections to an address.
	Cut func(netip.Addr) error
	// Later runs a function in the background until the node stops.
	Later func(func(context.Context))
	// Event writes an Event of a sandbox; kind is Normal or Warning.
	Event func(ref sandbox.Ref, kind, reason, text string)
	// OOMKills counts killed processes.
	OOMKills prometheus.Counter
}

// Supervisor watches running sandboxes. Make it with New.
type Supervisor struct{ cfg Config }

// New starts nothing.
func New(cfg Config) *Supervisor { return &Supervisor{cfg: cfg} }

// Watch watches a sandbox in the background until it ends or the next Watch.
func (s *Supervisor) Watch(u *registry.Handle, r *journal.Row) {
	stop := make(chan struct{})
	u.SetWatch(sync.OnceFunc(func() { close(stop) }))
	started := *r
	s.cfg.Later(func(ctx context.Context) {
		ctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() {
			select {
			case <-stop:
				cancel()
			case <-ctx.Done():
			}
		})
		s.observe(ctx, u, &started)
	})
}

// observe probes a sandbox, follows its entrypoint, and waits for the end of its process by pidfd.
func (s *Supervisor) observe(ctx context.Context, u *registry.Handle, r *journal.Row) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { s.probe(ctx, u, r) })
	wg.Go(func() { s.followEntrypoint(ctx, u, r) })
	wg.Go(func() { s.guardMemory(ctx, u, r) })
	wg.Go(func() { s.followSidecars(ctx, u, r) })
	for {
		err := r.Process.Wait(ctx)
		if ctx.Err() != nil {
			return // removed, stopped or restarted
		}
		if err == nil {
			break
		}
		s.cfg.Log.ErrorContext(ctx, "sandbox not watched", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		if !lifecycle.Sleep(ctx, watchRetry) {
			return
		}
	}
	s.Died(ctx, u, r, s.WhyDied(r, "its kernel or first process ended"))
}

// WhyDied returns why a sandbox's kernel or first process ended, by its cgroups, or else otherwise. In a container of class
// runc a failed fork ends nothing.
func (s *Supervisor) WhyDied(r *journal.Row, otherwise string) string {
	switch cgroup := s.cfg.Host.Cgroup(string(r.Plan.ID)); {
	case cgroups.OutOfMemory(cgroup):
		return fmt.Sprintf("out of memory: it used more than its %d MiB", r.Plan.Limits.Memory>>20)
	case r.Plan.Class == oci.GVisor && cgroups.OutOfPids(cgroup):
		return fmt.Sprintf("too many processes: gVisor got no more threads for those of the sandbox, in which a user may have %d", r.Plan.Processes())
	}
	return otherwise
}

// end ends a sandbox permanently: it writes that to the journal, kills what runs and resets connections.
func (s *Supervisor) end(ctx context.Context, u *registry.Handle, r *journal.Row, exit *int32, why string) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	now := u.Row()
	if taken.Err() != nil || u.IsRemoved() || now == nil || now.Process != r.Process || now.Stage == journal.Ended {
		return // it was changed meanwhile
	}
	s.cfg.Log.InfoContext(ctx, "sandbox ended", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name, telemetry.Reason, why)
	// The end of the watch, which calls this, must not cancel the rest.
	taken, cancel := context.WithTimeout(context.WithoutCancel(taken), endTimeout)
	defer cancel()
	changed := *now
	changed.Exit, changed.Why = exit, why
	if err := s.cfg.Registry.Note(u, &changed, journal.Ended); err != nil {
		s.cfg.Log.ErrorContext(ctx, "sandbox end not written to the journal", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
	if err := s.cfg.Host.Operation(&changed).Kill(taken); err != nil {
		s.cfg.Log.WarnContext(ctx, "processes of an ended sandbox not killed", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
	s.SawEnd(u, &changed)
	if err := s.cfg.Cut(changed.Address); err != nil {
		s.cfg.Log.WarnContext(ctx, "connections to an ended sandbox not reset", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}

// SawEnd shows a sandbox as ended.
func (s *Supervisor) SawEnd(u *registry.Handle, r *journal.Row) {
	u.Update(func(o *sandbox.Observed) {
		o.State, o.Probed, o.Message, o.EntrypointExit = sandbox.ContainerExited, false, r.Why, r.Exit
	})
	s.cfg.Changes.Mark(u.Ref)
}

// SetRunning shows a sandbox as running, and watches it.
func (s *Supervisor) SetRunning(u *registry.Handle, r *journal.Row) {
	s.Appears(u, r)
	s.Watch(u, r)
}

// Appears shows a sandbox as running. It is not ready before its probes succeed.
func (s *Supervisor) Appears(u *registry.Handle, r *journal.Row) {
	u.Update(func(o *sandbox.Observed) {
		*o = sandbox.Observed{
			State: sandbox.ContainerRunning, Address: r.Address, Node: s.cfg.Name, Runtime: string(r.Plan.Class),
			Image: r.Digest, StartedAt: r.StartedAt, Probed: r.Ready || !r.Plan.Probed(),
			Sidecars: startedSidecars(r), Operations: o.Operations,
		}
		if !o.Probed {
			o.Message = "its probes have not succeeded yet"
		}
	})
}
