package node

import (
	"context"
	"errors"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/inventory"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

const (
	// sweepEvery is the interval of sweeps.
	sweepEvery = time.Minute
	// scansBeforeRemoval is the number of consecutive scans in which a resource must be without a sandbox before it may be
	// removed. Resources of a sandbox that is being created are without one for less.
	scansBeforeRemoval = 2
	// existsTimeout bounds a call of Config.Exists.
	existsTimeout = 10 * time.Second
	// minRemovePause and maxRemovePause bound the pauses between two attempts to remove a sandbox; each is twice the one
	// before.
	minRemovePause = time.Second
	maxRemovePause = time.Minute
)

// Sweep reconciles the host with the journal; Run calls it every minute, beginning with the start. It
//
//   - adopts sandboxes of the journal that the registry lacks,
//   - retries what was interrupted,
//   - removes orphans: sandboxes that no caller has requested since the start, and resources without a row of the journal. It
//     removes them after two consecutive scans, and only if the source of truth ([Config.Exists]) reports without an error
//     that the sandbox does not exist. Of a sandbox whose name is unknown it removes only resources that no process uses.
func (n *Node) Sweep(ctx context.Context) {
	select {
	case n.sweeping <- struct{}{}:
		defer func() { <-n.sweeping }()
	case <-ctx.Done():
		return
	}
	n.rediscoverAll(ctx)
	v, err := n.inventory.Scan(ctx)
	if err != nil {
		if ctx.Err() == nil {
			n.log.WarnContext(ctx, "host not scanned; nothing removed", telemetry.Error, err)
		}
		return
	}
	n.retryInterrupted(ctx, &v)
	n.checkpoints.Settle(ctx)
	n.removeOrphans(ctx, &v)
}

// rediscoverAll adopts sandboxes of the journal that the registry lacks.
func (n *Node) rediscoverAll(ctx context.Context) {
	var lost []types.UID
	err := n.journal.Each(func(r *journal.Row) {
		if n.handles.Lookup(r.Plan.Ref.UID) == nil {
			lost = append(lost, r.Plan.Ref.UID)
		}
	}, func([]byte, []byte, error) {}) // logged at the start
	for _, uid := range lost {
		err = errors.Join(err, n.rediscover(ctx, uid))
	}
	if err != nil {
		n.log.WarnContext(ctx, "journal not compared with the registry", telemetry.Error, err)
	}
}

// retryInterrupted retries interrupted work of sandboxes whose lock is free.
func (n *Node) retryInterrupted(ctx context.Context, v *inventory.Inventory) {
	alive := map[string]bool{}
	for _, t := range v.Resources {
		alive[t.ID] = alive[t.ID] || t.Kind == inventory.KindContainer || t.Kind == inventory.KindCgroup
	}
	for _, u := range n.handles.All() {
		r := u.Row()
		if busy, _ := u.Holder(); r == nil || busy || ctx.Err() != nil {
			continue
		}
		if r.Stage != journal.Ended || alive[string(u.ID)] {
			n.retryInterruptedOne(ctx, u, r)
		}
		if _, recorded := v.Containers[string(u.ID)]; r.Stage.Begun() && !r.KeepsClaims() && !recorded {
			n.recordAgain(ctx, u)
		}
	}
}

func (n *Node) retryInterruptedOne(ctx context.Context, u *registry.Handle, r *journal.Row) {
	switch r.Stage {
	case journal.Removing:
		n.removeLater(u)
	case journal.Storing, journal.Waking, journal.Stored:
		n.suspender.Finish(ctx, u)
	case journal.Pausing, journal.Resuming:
		n.settleLater(ctx, u)
	case journal.Ended:
		n.killAgain(ctx, u)
	case journal.Making, journal.Live, journal.Paused, journal.Restarting, journal.Capturing:
		// another goroutine retries, or nothing is to do
	}
}

// settleLater settles a sandbox whose pause or resume was interrupted.
func (n *Node) settleLater(ctx context.Context, u *registry.Handle) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || (r.Stage != journal.Pausing && r.Stage != journal.Resuming) {
		return
	}
	n.suspender.Settle(taken, u, r)
	if now := u.Row(); now.Stage == journal.Paused {
		n.suspender.SetPaused(u, now)
		n.dirty.Mark(u.Ref)
	}
}

// killAgain kills the remaining processes of an ended sandbox.
func (n *Node) killAgain(ctx context.Context, u *registry.Handle) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || r.Stage != journal.Ended {
		return
	}
	limited, cancel := context.WithTimeout(taken, undoTimeout)
	defer cancel()
	if err := n.host.Operation(r).Kill(limited); err != nil {
		n.log.WarnContext(ctx, "processes of an ended sandbox not killed", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return
	}
	n.removedLeftover(ctx, inventory.KindContainer, u.Ref, string(u.ID))
}

// recordAgain restores the missing container record of a sandbox: it protects the image from garbage collection, and holds
// the address.
func (n *Node) recordAgain(ctx context.Context, u *registry.Handle) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || !r.Stage.Begun() || r.KeepsClaims() {
		return
	}
	w := n.host.Operation(r)
	w.Image.Ref = r.Plan.Image
	if img, err := n.cfg.Containerd.Resolve(taken, r.Plan.Image); err == nil {
		w.Image.Ref = img.Ref
	}
	if err := w.WriteRecord(taken); err != nil {
		n.log.WarnContext(ctx, "container record of a sandbox not restored", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return
	}
	n.log.WarnContext(ctx, "container record of a sandbox restored", telemetry.Sandbox, u.Ref.Name)
}

// removeOrphans removes resources that were without a sandbox in enough scans.
func (n *Node) removeOrphans(ctx context.Context, v *inventory.Inventory) {
	suspects := map[string]int{}
	suspicious := func(id string) bool {
		suspects[id] = min(n.orphanScans[id]+1, scansBeforeRemoval)
		return suspects[id] == scansBeforeRemoval
	}
	for _, u := range n.handles.All() {
		if u.Row() != nil && !u.IsDesired() && suspicious(string(u.ID)) && !n.mayExist(ctx, u.Ref) {
			n.removeOrphan(ctx, u.Ref, []inventory.Resource{{Kind: "sandbox", Name: u.Ref.Name, ID: string(u.ID)}})
		}
	}
	for id, left := range v.Leftovers() {
		if id == "" || !suspicious(id) {
			continue // Audit lists what has no ID
		}
		record, named := v.Containers[id]
		switch ref := refOfRecord(record); {
		case named && string(sandbox.IDOf(ref.UID)) != id:
			n.log.WarnContext(ctx, "container record without a sandbox's name kept", "id", id)
		case named:
			if !n.mayExist(ctx, ref) {
				n.removeOrphan(ctx, ref, left)
			}
		default:
			n.removeNameless(ctx, id, left)
		}
	}
	n.orphanScans = suspects
}

// mayExist reports whether the source of truth may have a sandbox: false only if it answered that it has not.
func (n *Node) mayExist(ctx context.Context, ref sandbox.Ref) bool {
	if n.cfg.Exists == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, existsTimeout)
	defer cancel()
	exists, err := n.cfg.Exists(ctx, ref)
	if err != nil {
		n.log.WarnContext(ctx, "sandbox kept; its existence is unknown", telemetry.Namespace, ref.Namespace, telemetry.Sandbox, ref.Name, telemetry.Error, err)
	}
	return exists || err != nil
}

func (n *Node) removeOrphan(ctx context.Context, ref sandbox.Ref, left []inventory.Resource) {
	if err := n.Remove(ctx, ref); err != nil {
		n.log.WarnContext(ctx, "orphaned sandbox not removed yet", telemetry.Sandbox, ref.Name, telemetry.Error, err)
		return
	}
	for _, t := range left {
		n.removedLeftover(ctx, t.Kind, ref, t.Name)
	}
}

// removeNameless removes the resources of a sandbox of which only the ID is known, if no process is in its cgroup or has its
// ID on the command line.
func (n *Node) removeNameless(ctx context.Context, id string, left []inventory.Resource) {
	if n.cfg.Exists == nil {
		return
	}
	done, ok := n.handles.BlockCreate(id)
	if !ok {
		return
	}
	defer done()
	inside, err := cgroups.HasProcesses(n.host.Cgroup(id))
	named, more := inventory.HasProcesses(id)
	if err = errors.Join(err, more); err != nil || inside || named {
		n.log.WarnContext(ctx, "processes of an unknown sandbox kept", "id", id, telemetry.Error, err)
		return
	}
	limited, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	w := n.host.Operation(&journal.Row{Stage: journal.Removing, Plan: plan.Plan{ID: sandbox.ID(id)}})
	if err := w.Undo(limited); err != nil {
		n.log.WarnContext(ctx, "orphaned resources not removed yet", "id", id, telemetry.Error, err)
		return
	}
	for _, t := range left {
		n.removedLeftover(ctx, t.Kind, sandbox.Ref{}, t.Name)
	}
}

func (n *Node) removedLeftover(ctx context.Context, kind string, ref sandbox.Ref, name string) {
	n.log.InfoContext(ctx, "orphaned resource removed", "kind", kind, "name", name,
		telemetry.Namespace, ref.Namespace, telemetry.Sandbox, ref.Name)
	n.removals.WithLabelValues(strings.ReplaceAll(kind, " ", "_")).Inc()
}

// removeLater retries a failed removal in the background, without end. The row and the address of the sandbox stay until it
// succeeds.
func (n *Node) removeLater(u *registry.Handle) {
	if !u.SetRetrying(true) {
		return
	}
	n.tasks.Start(func(ctx context.Context) {
		defer u.SetRetrying(false)
		for pause := minRemovePause; lifecycle.Sleep(ctx, pause); pause = min(2*pause, maxRemovePause) {
			n.undoLeft(ctx, u)
			if r := u.Row(); u.IsRemoved() || r == nil || r.Stage.Begun() {
				n.dirty.Mark(u.Ref)
				return
			}
		}
	})
}

func refOfRecord(r ctrd.Container) sandbox.Ref {
	return sandbox.Ref{Namespace: r.Labels[operation.LabelNamespace], Name: r.Labels[operation.LabelName], UID: types.UID(r.Labels[operation.LabelSandbox])}
}

// ObjectDeleted records that the object of a name is gone without a Remove, as when a client removes its finalizer. The next
// sweeps then remove the sandboxes of that name if they do not exist.
func (n *Node) ObjectDeleted(namespace, name string) { n.handles.ClearDesired(namespace, name) }
