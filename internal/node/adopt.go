package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

const (
	// maxConcurrentAdoptions bounds the sandboxes that are adopted at the same time.
	maxConcurrentAdoptions = 8
	// bootPatience bounds the wait for containerd at the start, bootPause is the pause between two requests.
	bootPatience = 3 * time.Minute
	bootPause    = 500 * time.Millisecond
)

// adopt takes over the sandboxes of an earlier process: it adopts those that exist, undoes those that were being created or
// removed, and reconciles the address leases. It decides nothing before the journal and containerd have both answered, and
// removes nothing that may be running.
func (n *Node) adopt(ctx context.Context) error {
	began := time.Now()
	rows, err := n.readJournal(ctx)
	if err != nil {
		return err
	}
	if err := n.checkpoints.LoadLogged(ctx); err != nil {
		return err
	}
	records, err := n.awaitRecords(ctx)
	if err != nil {
		return err
	}
	if err := n.suspender.RemoveOrphans(ctx, n.sleepers(rows, records)); err != nil {
		n.log.WarnContext(ctx, "orphaned memory images not removed", telemetry.Error, err)
	}
	for _, r := range rows { // every address is leased before the first change
		n.handles.Of(r.Plan.Ref).SetRow(r)
		n.claimAddress(ctx, r)
	}
	lives := n.eachRow(rows, func(r *journal.Row) bool { return r.Stage.Begun() }, func(r *journal.Row) { n.takeOver(ctx, n.handles.Of(r.Plan.Ref), r) })
	undone := n.eachRow(rows, func(r *journal.Row) bool { return !r.Stage.Begun() }, func(r *journal.Row) { n.undoLeft(ctx, n.handles.Of(r.Plan.Ref)) })
	n.checkpoints.Adopt(ctx)
	if err := n.removeOrphanSnapshots(ctx); err != nil {
		n.log.WarnContext(ctx, "orphaned snapshots not removed", telemetry.Error, err)
	}
	if err := n.firstReconcile(ctx); err != nil {
		return err
	}
	n.log.InfoContext(ctx, "sandboxes adopted", "adopted", lives, "undone", undone, telemetry.Duration, time.Since(began))
	return nil
}

// readJournal reads all rows, and records the UIDs of unreadable ones.
func (n *Node) readJournal(ctx context.Context) (rows []*journal.Row, err error) {
	err = n.journal.Each(func(r *journal.Row) { rows = append(rows, r) }, func(key, value []byte, err error) {
		n.handles.SetUnread(types.UID(key), err)
		n.log.ErrorContext(ctx, "unreadable journal row kept, with its sandbox",
			"key", fmt.Sprintf("%q", key), "value", fmt.Sprintf("%q", value), telemetry.Error, err)
	})
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	return rows, nil
}

// awaitRecords waits for containerd, which may be starting, and lists its containers. A timeout is an errs.ErrUnavailable:
// without the list nothing is adopted.
func (n *Node) awaitRecords(ctx context.Context) ([]ctrd.Container, error) {
	ctx, cancel := context.WithTimeout(ctx, n.bootPatience)
	defer cancel()
	for {
		records, err := n.cfg.Containerd.Records(ctx)
		if err == nil {
			return records, nil
		}
		n.log.WarnContext(ctx, "adoption waits for containerd", telemetry.Error, err)
		if !lifecycle.Sleep(ctx, bootPause) {
			return nil, fmt.Errorf("adopt what runs: %w", errs.Retryable(err))
		}
	}
}

// sleepers returns the IDs of sandboxes whose memory image must be kept.
func (n *Node) sleepers(rows []*journal.Row, records []ctrd.Container) map[string]bool {
	keep, known := map[string]bool{}, map[string]bool{}
	for _, r := range rows {
		known[string(r.Plan.ID)] = true
		if r.OnDisk() && r.KeepsMemory() {
			keep[string(r.Plan.ID)] = true
		}
	}
	for _, r := range records {
		if !known[r.ID] { // the journal lost it; the sweep checks whether it exists
			keep[r.ID] = true
		}
	}
	for id := range n.handles.UnreadIDs() {
		keep[id] = true
	}
	return keep
}

// eachRow calls do for the selected rows, several at once, and counts them.
func (n *Node) eachRow(rows []*journal.Row, meant func(*journal.Row) bool, do func(*journal.Row)) (count int) {
	var group errgroup.Group
	group.SetLimit(maxConcurrentAdoptions)
	for _, r := range rows {
		if meant(r) {
			count++
			group.Go(func() error {
				do(r)
				return nil
			})
		}
	}
	_ = group.Wait()
	return count
}

// claimAddress leases the address of a sandbox to it, unless it has the lease.
func (n *Node) claimAddress(ctx context.Context, r *journal.Row) {
	if !r.Stage.Begun() || !r.Address.IsValid() {
		return
	}
	if err := n.allocator.Claim(string(r.Plan.Ref.UID), r.Address); err != nil {
		n.log.ErrorContext(ctx, "address of a sandbox not leased to it", telemetry.Sandbox, r.Plan.Ref.Name,
			telemetry.Address, r.Address, telemetry.Error, err)
	}
}

// takeOver adopts a sandbox of the journal.
func (n *Node) takeOver(ctx context.Context, u *registry.Handle, r *journal.Row) {
	n.supervisor.Appears(u, r)
	n.adoptEgress(ctx, u, r)
	switch {
	case r.Stage == journal.Ended:
		n.supervisor.SawEnd(u, r)
		return
	case r.Stage == journal.Restarting:
		n.supervisor.SeeRestart(u, "its container was being replaced when the server ended")
		n.supervisor.RestartLater(u, r, 0)
		return
	case r.OnDisk():
		n.suspender.TakeOver(ctx, u, r)
		return
	case !r.Process.Alive():
		r = n.maker.Uncaptured(u, r)
		n.supervisor.Died(ctx, u, r, n.supervisor.WhyDied(r, "it ended while the server was down"))
		return
	}
	if r.Stage == journal.Capturing {
		r = n.maker.Recover(ctx, u, r)
	}
	n.supervisor.Watch(u, r)
	work := n.host.Operation(r)
	if err := n.network.Adopt(ctx, work.Endpoint()); err != nil {
		n.log.WarnContext(ctx, "network of a sandbox not adopted", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
	if r.Stage == journal.Live {
		return
	}
	if r.Stage != journal.Paused { // a pause or resume was interrupted
		n.suspender.Settle(ctx, u, r)
	}
	if now := u.Row(); now.Stage == journal.Paused {
		n.suspender.SetPaused(u, now)
	}
}

// rediscover adopts a sandbox of the journal that the registry lacks. The registry is an index of the journal; no decision
// rests on an absence from an index.
func (n *Node) rediscover(ctx context.Context, uid types.UID) error {
	if n.handles.Lookup(uid) != nil {
		return nil
	}
	r, err := n.journal.Get(uid)
	if err != nil || r == nil {
		return errs.Retryable(err)
	}
	u := n.handles.Of(r.Plan.Ref)
	_, done, err := u.Acquire(ctx)
	if err != nil {
		return err
	}
	r, err = n.journal.Get(uid) // again, with the lock held
	found := err == nil && r != nil && !u.IsRemoved() && u.Row() == nil
	if found {
		u.SetRow(r)
	} else if u.Row() == nil {
		u.MarkRemoved()
		n.handles.Drop(u)
	}
	done()
	if !found {
		return errs.Retryable(err)
	}
	n.log.ErrorContext(ctx, "sandbox of the journal was not in the registry; adopting it", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name)
	if !r.Stage.Begun() {
		n.undoLeft(ctx, u)
		return nil
	}
	n.claimAddress(ctx, r)
	n.takeOver(ctx, u, r)
	return nil
}

// undoLeft undoes an interrupted create or removal. After a failure the row and the address stay, and Run retries.
func (n *Node) undoLeft(ctx context.Context, u *registry.Handle) {
	taken, done, err := u.Acquire(ctx)
	if err != nil {
		return
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || r.Stage.Begun() {
		return
	}
	limited, cancel := context.WithTimeout(taken, undoTimeout)
	defer cancel()
	if err := n.clear(limited, u, r); err != nil {
		n.log.WarnContext(ctx, "sandbox not removed yet", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return
	}
	u.MarkRemoved()
	n.handles.Drop(u)
}

// removeOrphanSnapshots removes snapshots without a sandbox, container record or mount: containerd may complete a request
// after its call has failed. No sandbox may be created meanwhile.
func (n *Node) removeOrphanSnapshots(ctx context.Context) error {
	keys, err := n.cfg.Containerd.Snapshots(ctx)
	if err != nil || len(keys) == 0 {
		return err
	}
	records, err := n.cfg.Containerd.Records(ctx)
	if err != nil {
		return err
	}
	mounted, err := n.inventory.Mounts()
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, id := range mounted {
		used[id] = true
	}
	for _, r := range records {
		used[r.Snapshot] = true
	}
	for _, u := range n.handles.All() {
		used[string(u.ID)] = used[string(u.ID)] || u.Row() != nil
	}
	for id := range n.handles.UnreadIDs() {
		used[id] = true
	}
	var failures []error
	for _, key := range keys {
		if !used[key] {
			n.log.InfoContext(ctx, "orphaned snapshot removed", "snapshot", key)
			failures = append(failures, n.cfg.Containerd.RemoveSnapshot(ctx, key))
		}
	}
	return errors.Join(failures...)
}

// Destroy removes all sandboxes and the network of the instance. Run must have returned; afterwards only Close may be
// called.
func (n *Node) Destroy(ctx context.Context) error {
	var failures []error
	err := n.journal.Each(func(r *journal.Row) {
		u := n.handles.Of(r.Plan.Ref)
		u.SetRow(r)
	}, func(key, _ []byte, _ error) { // unreadable: its resources have names that derive from the UID
		ref := sandbox.Ref{UID: types.UID(key)}
		n.handles.Of(ref).SetRow(&journal.Row{Stage: journal.Removing, Plan: plan.Plan{Ref: ref, ID: sandbox.IDOf(ref.UID)}})
	})
	failures = append(failures, err)
	for _, u := range n.handles.All() {
		if r := u.Row(); r != nil {
			failures = append(failures, n.clear(ctx, u, r))
		}
	}
	failures = append(failures, n.clearLeftovers(ctx), n.checkpoints.Destroy(ctx), n.removeOrphanSnapshots(ctx))
	for _, r := range n.runtimes.All() {
		failures = append(failures, r.Destroy())
	}
	failures = append(failures, n.network.Destroy(ctx), cgroups.Remove(n.cfg.CgroupParent))
	return errors.Join(failures...)
}

// clearLeftovers removes resources without a row of the journal.
func (n *Node) clearLeftovers(ctx context.Context) error {
	v, err := n.inventory.Scan(ctx)
	failures := []error{err}
	for id := range v.Leftovers() {
		if id != "" {
			w := n.host.Operation(&journal.Row{Stage: journal.Removing, Plan: plan.Plan{ID: sandbox.ID(id)}})
			failures = append(failures, w.Undo(ctx))
		}
	}
	return errors.Join(failures...)
}
