package recovery

import (
	"context"
	"errors"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

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
	// ScansBeforeRemoval is the number of consecutive scans in which a resource must be without a sandbox before it may be
	// removed. Resources of a sandbox that is being created are without one for less.
	ScansBeforeRemoval = 2
	// existsTimeout bounds a call of Config.Exists.
	existsTimeout = 10 * time.Second
	// minRemovePause and maxRemovePause bound the pauses between two attempts to remove a sandbox; each is twice the one
	// before.
	minRemovePause = time.Second
	maxRemovePause = time.Minute
)

// Sweep reconciles the host with the journal; the node calls it every minute, beginning with the start. It
//
//   - adopts sandboxes of the journal that the registry lacks,
//   - retries what was interrupted,
//   - removes orphans: sandboxes that no caller has requested since the start, and resources without a row of the journal. It
//     removes them after two consecutive scans, and only if the source of truth (Config.Exists) reports without an error
//     that the sandbox does not exist. Of a sandbox whose name is unknown it removes only resources that no process uses.
func (rc *Recovery) Sweep(ctx context.Context) {
	select {
	case rc.sweeping <- struct{}{}:
		defer func() { <-rc.sweeping }()
	case <-ctx.Done():
		return
	}
	rc.rediscoverAll(ctx)
	v, err := rc.cfg.Inventory.Scan(ctx)
	if err != nil {
		if ctx.Err() == nil {
			rc.cfg.Sweeps.WithLabelValues(SweepFailed).Inc()
			rc.cfg.Log.WarnContext(ctx, "host not scanned; nothing removed", telemetry.Error, err)
		}
		return
	}
	rc.retryInterrupted(ctx, &v)
	rc.cfg.Checkpoints.Settle(ctx)
	rc.removeOrphans(ctx, &v)
}

// rediscoverAll adopts sandboxes of the journal that the registry lacks.
func (rc *Recovery) rediscoverAll(ctx context.Context) {
	uids, err := rc.cfg.Journal.UIDs()
	for _, uid := range uids {
		if rc.cfg.Registry.CheckRead(sandbox.Ref{UID: uid}) == nil { // others were logged at the start
			err = errors.Join(err, rc.Rediscover(ctx, uid))
		}
	}
	if err != nil {
		rc.cfg.Log.WarnContext(ctx, "journal not compared with the registry", telemetry.Error, err)
	}
}

// retryInterrupted retries interrupted work of sandboxes whose lock is free.
func (rc *Recovery) retryInterrupted(ctx context.Context, v *inventory.Inventory) {
	alive := map[string]bool{}
	for _, t := range v.Resources {
		alive[t.ID] = alive[t.ID] || t.Kind == inventory.KindContainer || t.Kind == inventory.KindCgroup
	}
	for _, u := range rc.cfg.Registry.All() {
		r := u.Row()
		if busy, _ := u.Holder(); r == nil || busy || ctx.Err() != nil {
			continue
		}
		if r.Stage != journal.Ended || alive[string(u.ID)] {
			rc.retryInterruptedOne(ctx, u, r)
		}
		if _, recorded := v.Containers[string(u.ID)]; r.Stage.Begun() && !r.KeepsClaims() && !recorded {
			rc.recordAgain(ctx, u)
		}
	}
}

func (rc *Recovery) retryInterruptedOne(ctx context.Context, u *registry.Handle, r *journal.Row) {
	switch r.Stage {
	case journal.Removing:
		rc.removeLater(u)
	case journal.Storing, journal.Waking, journal.Stored:
		rc.cfg.Suspender.Finish(ctx, u)
	case journal.Pausing, journal.Resuming:
		rc.settleLater(ctx, u)
	case journal.Ended:
		rc.killAgain(ctx, u)
	case journal.Making, journal.Live, journal.Paused, journal.Restarting, journal.Capturing:
		// another goroutine retries, or nothing is to do
	}
}

// settleLater settles a sandbox whose pause or resume was interrupted.
func (rc *Recovery) settleLater(ctx context.Context, u *registry.Handle) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || (r.Stage != journal.Pausing && r.Stage != journal.Resuming) {
		return
	}
	rc.cfg.Suspender.Settle(taken, u, r)
	if now := u.Row(); now.Stage == journal.Paused {
		rc.cfg.Suspender.SetPaused(u, now)
		rc.cfg.Changes.Mark(u.Ref)
	}
}

// killAgain kills the remaining processes of an ended sandbox.
func (rc *Recovery) killAgain(ctx context.Context, u *registry.Handle) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || r.Stage != journal.Ended {
		return
	}
	limited, cancel := context.WithTimeout(taken, UndoTimeout)
	defer cancel()
	if err := rc.cfg.Host.Operation(r).Kill(limited); err != nil {
		rc.cfg.Log.WarnContext(ctx, "processes of an ended sandbox not killed", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return
	}
	rc.removedLeftover(ctx, inventory.KindContainer, u.Ref, string(u.ID))
}

// recordAgain restores the missing container record of a sandbox: it protects the image from garbage collection, and holds
// the address.
func (rc *Recovery) recordAgain(ctx context.Context, u *registry.Handle) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || !r.Stage.Begun() || r.KeepsClaims() {
		return
	}
	w := rc.cfg.Host.Operation(r)
	w.Image.Ref = r.Plan.Image
	if img, err := rc.cfg.Containerd.Resolve(taken, r.Plan.Image); err == nil {
		w.Image.Ref = img.Ref
	}
	if err := w.WriteRecord(taken); err != nil {
		rc.cfg.Log.WarnContext(ctx, "container record of a sandbox not restored", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return
	}
	rc.cfg.Log.WarnContext(ctx, "container record of a sandbox restored", telemetry.Sandbox, u.Ref.Name)
}

// removeOrphans removes resources that were without a sandbox in enough scans.
func (rc *Recovery) removeOrphans(ctx context.Context, v *inventory.Inventory) {
	suspects := map[string]int{}
	suspicious := func(id string) bool {
		suspects[id] = min(rc.orphanScans[id]+1, ScansBeforeRemoval)
		return suspects[id] == ScansBeforeRemoval
	}
	for _, u := range rc.cfg.Registry.All() {
		if u.Row() != nil && !u.IsDesired() && suspicious(string(u.ID)) && !rc.mayExist(ctx, u.Ref) {
			rc.removeOrphan(ctx, u.Ref, []inventory.Resource{{Kind: "sandbox", Name: u.Ref.Name, ID: string(u.ID)}})
		}
	}
	for id, left := range v.Leftovers() {
		if id == "" || !suspicious(id) {
			continue // Audit lists what has no ID
		}
		record, named := v.Containers[id]
		switch ref := refOfRecord(record); {
		case named && string(sandbox.IDOf(ref.UID)) != id:
			rc.cfg.Log.WarnContext(ctx, "container record without a sandbox's name kept", "id", id)
		case named:
			if !rc.mayExist(ctx, ref) {
				rc.removeOrphan(ctx, ref, left)
			}
		default:
			rc.removeNameless(ctx, id, left)
		}
	}
	rc.orphanScans = suspects
	rc.cfg.Sweeps.WithLabelValues(SweepOK).Inc()
}

// mayExist reports whether the source of truth may have a sandbox: false only if it answered that it has not.
func (rc *Recovery) mayExist(ctx context.Context, ref sandbox.Ref) bool {
	if rc.cfg.Exists == nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, existsTimeout)
	defer cancel()
	exists, err := rc.cfg.Exists(ctx, ref)
	if err != nil {
		rc.cfg.Log.WarnContext(ctx, "sandbox kept; its existence is unknown", telemetry.Namespace, ref.Namespace, telemetry.Sandbox, ref.Name, telemetry.Error, err)
	}
	return exists || err != nil
}

func (rc *Recovery) removeOrphan(ctx context.Context, ref sandbox.Ref, left []inventory.Resource) {
	if err := rc.Remove(ctx, ref); err != nil {
		rc.cfg.Log.WarnContext(ctx, "orphaned sandbox not removed yet", telemetry.Sandbox, ref.Name, telemetry.Error, err)
		return
	}
	for _, t := range left {
		rc.removedLeftover(ctx, t.Kind, ref, t.Name)
	}
}

// removeNameless removes the resources of a sandbox of which only the ID is known, if no process is in its cgroup or has its
// ID on the command line.
func (rc *Recovery) removeNameless(ctx context.Context, id string, left []inventory.Resource) {
	if rc.cfg.Exists == nil {
		return
	}
	done, ok := rc.cfg.Registry.BlockCreate(id)
	if !ok {
		return
	}
	defer done()
	inside, err := cgroups.HasProcesses(rc.cfg.Host.Cgroup(id))
	named, more := inventory.HasProcesses(id)
	if err = errors.Join(err, more); err != nil || inside || named {
		rc.cfg.Log.WarnContext(ctx, "processes of an unknown sandbox kept", "id", id, telemetry.Error, err)
		return
	}
	limited, cancel := context.WithTimeout(ctx, UndoTimeout)
	defer cancel()
	w := rc.cfg.Host.Operation(&journal.Row{Stage: journal.Removing, Plan: plan.Plan{ID: sandbox.ID(id)}})
	if err := w.Undo(limited); err != nil {
		rc.cfg.Log.WarnContext(ctx, "orphaned resources not removed yet", "id", id, telemetry.Error, err)
		return
	}
	for _, t := range left {
		rc.removedLeftover(ctx, t.Kind, sandbox.Ref{}, t.Name)
	}
}

func (rc *Recovery) removedLeftover(ctx context.Context, kind string, ref sandbox.Ref, name string) {
	rc.cfg.Log.InfoContext(ctx, "orphaned resource removed", "kind", kind, "name", name,
		telemetry.Namespace, ref.Namespace, telemetry.Sandbox, ref.Name)
	rc.cfg.Removals.WithLabelValues(strings.ReplaceAll(kind, " ", "_")).Inc()
}

func refOfRecord(r ctrd.Container) sandbox.Ref {
	return sandbox.Ref{Namespace: r.Labels[operation.LabelNamespace], Name: r.Labels[operation.LabelName], UID: types.UID(r.Labels[operation.LabelSandbox])}
}
