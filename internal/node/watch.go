package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// watchRetry is the pause before a process is watched again after the kernel refused that.
const watchRetry = time.Second

// watch has Run look after a sandbox until it ends or is watched anew.
func (n *Node) watch(u *registry.Handle, r *journal.Row) {
	stop := make(chan struct{})
	u.SetWatch(sync.OnceFunc(func() { close(stop) }))
	started := *r
	n.tasks.Start(func(ctx context.Context) {
		ctx, cancel := context.WithCancel(ctx)
		var looking sync.WaitGroup
		defer looking.Wait()
		defer cancel()
		looking.Go(func() {
			select {
			case <-stop:
				cancel()
			case <-ctx.Done():
			}
		})
		n.lookAfter(ctx, u, &started)
	})
}

// lookAfter probes a sandbox, follows its entrypoint, and waits for the end of its process,
// woken by the kernel.
func (n *Node) lookAfter(ctx context.Context, u *registry.Handle, r *journal.Row) {
	var looking sync.WaitGroup
	defer looking.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	looking.Go(func() { n.probe(ctx, u, r) })
	looking.Go(func() { n.followEntrypoint(ctx, u, r) })
	for {
		err := r.Process.Wait(ctx)
		if ctx.Err() != nil {
			return // removed, stopped or started anew
		}
		if err == nil {
			break
		}
		n.log.ErrorContext(ctx, "sandbox cannot be watched, trying again", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		if !lifecycle.Sleep(ctx, watchRetry) {
			return
		}
	}
	n.died(ctx, u, r, n.whyDied(r, "its kernel or first process ended"))
}

// whyDied says what ended a sandbox's kernel or first process, as its cgroups have it, or else what is
// given. In a container of class runc a refused process ends nothing.
func (n *Node) whyDied(r *journal.Row, otherwise string) string {
	switch cgroup := n.host.Cgroup(string(r.Plan.ID)); {
	case cgroups.OutOfMemory(cgroup):
		return fmt.Sprintf("out of memory: it used more than its %d MiB", r.Plan.Limits.Memory>>20)
	case r.Plan.Class == oci.GVisor && cgroups.OutOfPids(cgroup):
		return fmt.Sprintf("too many processes: gVisor got no more threads for those of the sandbox, in which a user may have %d", r.Plan.Processes())
	}
	return otherwise
}

// end notes that a sandbox has ended for good, and that nothing of it may run on.
func (n *Node) end(ctx context.Context, u *registry.Handle, r *journal.Row, exit *int32, why string) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	now := u.Row()
	if taken.Err() != nil || u.IsRemoved() || now == nil || now.Process != r.Process || now.Stage == journal.Ended {
		return // it is another's affair by now
	}
	n.log.InfoContext(ctx, "sandbox ended", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name, telemetry.Reason, why)
	// What follows must not be cut short by the watch, of which this is a part.
	taken, cancel := context.WithTimeout(context.WithoutCancel(taken), undoTimeout)
	defer cancel()
	changed := *now
	changed.Exit, changed.Why = exit, why
	if err := n.handles.Note(u, &changed, journal.Ended); err != nil {
		n.log.ErrorContext(ctx, "end of a sandbox not noted", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
	if err := n.host.Operation(&changed).Kill(taken); err != nil {
		n.log.WarnContext(ctx, "rest of a sandbox that ended still runs", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
	n.sawEnd(u, &changed)
	if err := n.network.Cut(changed.Address); err != nil {
		n.log.WarnContext(ctx, "connections to a sandbox that ended are left to wait", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
}

// sawEnd makes the end of a sandbox seen.
func (n *Node) sawEnd(u *registry.Handle, r *journal.Row) {
	u.Update(func(o *sandbox.Observed) {
		o.State, o.Probed, o.Message, o.EntrypointExit = sandbox.ContainerExited, false, r.Why, r.Exit
	})
	n.dirty.Mark(u.Ref)
}
