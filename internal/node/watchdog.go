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
	// sweepEvery is how often the node looks for what nobody asks for and for what is left.
	sweepEvery = time.Minute
	// scansBeforeRemoval is in how many looks in a row something must have been without a sandbox
	// before anybody is asked whether it may go: what is in the making is hit by none.
	scansBeforeRemoval = 2
	// existsTimeout bounds the question to the source of truth.
	existsTimeout = 10 * time.Second
	// firstRemovePause and longRemovePause bound the pauses between two tries to remove a
	// sandbox; each is twice the one before.
	firstRemovePause = time.Second
	longRemovePause  = time.Minute
)

// Sweep is one look of the watchdog; Run calls it every minute, beginning with the start. It
//
//   - takes over what the journal has and the node does not know,
//   - goes on with what was left in the middle,
//   - removes sandboxes that nobody has asked for since the start, and what is on the machine
//     without a row of the journal, after two looks in a row, and only where the source of truth
//     ([Config.Exists]) clearly says that the sandbox does not exist. Whatever else it answers
//     keeps them. Where the name of a sandbox cannot be known, only what nothing living can be
//     part of is removed.
func (n *Node) Sweep(ctx context.Context) {
	select {
	case n.looking <- struct{}{}:
		defer func() { <-n.looking }()
	case <-ctx.Done():
		return
	}
	n.rediscoverAll(ctx)
	v, err := n.inventory.Scan(ctx)
	if err != nil {
		if ctx.Err() == nil {
			n.log.WarnContext(ctx, "what is on the machine is not known in full; nothing is removed", telemetry.Error, err)
		}
		return
	}
	n.retryInterrupted(ctx, &v)
	n.checkpoints.Settle(ctx)
	n.removeOrphans(ctx, &v)
}

// rediscoverAll takes over what the journal has and the node does not know.
func (n *Node) rediscoverAll(ctx context.Context) {
	var lost []types.UID
	err := n.journal.Each(func(r *journal.Row) {
		if n.handles.Lookup(r.Plan.Ref.UID) == nil {
			lost = append(lost, r.Plan.Ref.UID)
		}
	}, func([]byte, []byte, error) {}) // told at the start
	for _, uid := range lost {
		err = errors.Join(err, n.rediscover(ctx, uid))
	}
	if err != nil {
		n.log.WarnContext(ctx, "journal not compared with what is known", telemetry.Error, err)
	}
}

// retryInterrupted continues what was left in the middle, where nobody is at it just now.
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
		// somebody is at it, or there is nothing to do
	}
}

// settleLater finds out whether a sandbox sleeps that was asked to and whose answer was lost.
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

// killAgain ends what still runs of a sandbox that has ended.
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
		n.log.WarnContext(ctx, "rest of a sandbox that ended still runs", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return
	}
	n.removedLeftover(ctx, inventory.KindContainer, u.Ref, string(u.ID))
}

// recordAgain writes the record of a sandbox that somebody has removed: it keeps the image from
// being collected, and tells the address.
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
		n.log.WarnContext(ctx, "record of a sandbox is missing", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return
	}
	n.log.WarnContext(ctx, "record of a sandbox was missing and is written again", telemetry.Sandbox, u.Ref.Name)
}

// doubt asks of what has been without a sandbox for long enough, and removes what may go.
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
			continue // what has no ID is told by Audit
		}
		record, named := v.Containers[id]
		switch ref := refOfRecord(record); {
		case named && string(sandbox.IDOf(ref.UID)) != id:
			n.log.WarnContext(ctx, "record of a container without a sandbox's name is kept", "id", id)
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

// mayExist asks the source of truth; only a clear no is false.
func (n *Node) mayExist(ctx context.Context, ref sandbox.Ref) bool {
	if n.cfg.Exists == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, existsTimeout)
	defer cancel()
	exists, err := n.cfg.Exists(ctx, ref)
	if err != nil {
		n.log.WarnContext(ctx, "not known whether a sandbox exists; it is kept", telemetry.Namespace, ref.Namespace, telemetry.Sandbox, ref.Name, telemetry.Error, err)
	}
	return exists || err != nil
}

func (n *Node) removeOrphan(ctx context.Context, ref sandbox.Ref, left []inventory.Resource) {
	if err := n.Remove(ctx, ref); err != nil {
		n.log.WarnContext(ctx, "what is left of a sandbox that does not exist cannot be removed yet", telemetry.Sandbox, ref.Name, telemetry.Error, err)
		return
	}
	for _, t := range left {
		n.removedLeftover(ctx, t.Kind, ref, t.Name)
	}
}

// removeNameless removes what is left of a sandbox of which only the ID is known, provided that
// nothing living can be part of it: no process is in its cgroup or has its ID on the command line.
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
		n.log.WarnContext(ctx, "something runs without a sandbox that can be named; it is kept", "id", id, telemetry.Error, err)
		return
	}
	limited, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	w := n.host.Operation(&journal.Row{Stage: journal.Removing, Plan: plan.Plan{ID: sandbox.ID(id)}})
	if err := w.Undo(limited); err != nil {
		n.log.WarnContext(ctx, "leftovers cannot be removed yet", "id", id, telemetry.Error, err)
		return
	}
	for _, t := range left {
		n.removedLeftover(ctx, t.Kind, sandbox.Ref{}, t.Name)
	}
}

func (n *Node) removedLeftover(ctx context.Context, kind string, ref sandbox.Ref, name string) {
	n.log.InfoContext(ctx, "removed what was left without a sandbox", "kind", kind, "name", name,
		telemetry.Namespace, ref.Namespace, telemetry.Sandbox, ref.Name)
	n.removals.WithLabelValues(strings.ReplaceAll(kind, " ", "_")).Inc()
}

// removeLater has Run remove a sandbox whose removal failed, and try for ever, with pauses that
// are bounded. Until it succeeds its row and its address stay.
func (n *Node) removeLater(u *registry.Handle) {
	if !u.SetRetrying(true) {
		return
	}
	n.tasks.Start(func(ctx context.Context) {
		defer u.SetRetrying(false)
		for pause := firstRemovePause; lifecycle.Sleep(ctx, pause); pause = min(2*pause, longRemovePause) {
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

// ObjectDeleted notes that the object of a name is gone. If sandboxes of that name are still on the node,
// the orphan scan asks whether they exist, and removes those that do not. An object goes like that when a client
// removes its finalizer.
func (n *Node) ObjectDeleted(namespace, name string) { n.handles.ClearDesired(namespace, name) }
