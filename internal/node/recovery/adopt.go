package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

const (
	// maxConcurrentAdoptions bounds the sandboxes that are adopted at the same time.
	maxConcurrentAdoptions = 8
	// BootPause is the pause between two requests to containerd at the start.
	BootPause = 500 * time.Millisecond
)

// Adopt takes over the sandboxes of an earlier process: it adopts those that exist, undoes those that were being created or
// removed, and reconciles the address leases. It decides nothing before the journal and containerd have both answered, and
// removes nothing that may be running.
func (rc *Recovery) Adopt(ctx context.Context) error {
	began := time.Now()
	rows, records, err := rc.list(ctx)
	if err != nil {
		return err
	}
	if err := rc.cfg.Checkpoints.LoadLogged(ctx); err != nil {
		return err
	}
	if err := rc.cfg.Suspender.RemoveOrphans(ctx, rc.sleepers(rows, records)); err != nil {
		rc.cfg.Log.WarnContext(ctx, "orphaned memory images not removed", telemetry.Error, err)
	}
	for _, r := range rows { // every address is leased before the first change
		rc.cfg.Registry.Of(r.Plan.Ref).SetRow(r)
		rc.claimAddress(ctx, r)
	}
	// Sandboxes that are not at rest may change, and with them their records.
	unfinished := slices.ContainsFunc(rows, func(r *journal.Row) bool { return r.OnDisk() && !rc.cfg.Suspender.AtRest(r) })
	lives := rc.eachRow(rows, func(r *journal.Row) bool { return r.Stage.Begun() }, func(r *journal.Row) { rc.takeOver(ctx, rc.cfg.Registry.Of(r.Plan.Ref), r) })
	undone := rc.eachRow(rows, func(r *journal.Row) bool { return !r.Stage.Begun() }, func(r *journal.Row) { rc.undoLeft(ctx, rc.cfg.Registry.Of(r.Plan.Ref)) })
	if unfinished || slices.ContainsFunc(rows, rc.hasChanged) {
		if records, err = rc.awaitRecords(ctx); err != nil {
			return err
		}
	}
	rc.cfg.Checkpoints.Adopt(ctx)
	if err := rc.removeOrphanSnapshots(ctx, records); err != nil {
		rc.cfg.Log.WarnContext(ctx, "orphaned snapshots not removed", telemetry.Error, err)
	}
	if err := rc.cfg.ReconcileAddresses(ctx, rc.summaries(), records); err != nil {
		return err
	}
	rc.cfg.Log.InfoContext(ctx, "sandboxes adopted", "adopted", lives, "undone", undone, telemetry.Duration, time.Since(began))
	return nil
}

// hasChanged reports whether a row is not the one of its sandbox any more, whose record may be another then, too.
func (rc *Recovery) hasChanged(r *journal.Row) bool {
	u := rc.cfg.Registry.Lookup(r.Plan.Ref.UID)
	return u == nil || u.Row() != r
}

// summaries returns those of all rows that could be read.
func (rc *Recovery) summaries() (out []journal.Summary) {
	for _, u := range rc.cfg.Registry.All() {
		if r := u.Row(); r != nil {
			out = append(out, r.Summary())
		}
	}
	return out
}

// listing is what an earlier process has left.
type listing struct {
	reads   sync.WaitGroup // of the rest
	rows    []*journal.Row
	rowsErr error
	records []ctrd.Container
	// recordsErr is nil if records are complete.
	recordsErr error
}

// ReadAhead starts to read what Adopt begins with, while the server waits for other work. It is called at most once, before Adopt, and
// nothing else may use the node until then. The returned function waits for the end. A containerd that is yet to be started is left to
// Adopt.
func (rc *Recovery) ReadAhead(ctx context.Context) (wait func()) {
	l := &listing{}
	rc.ahead = l
	l.reads.Go(func() { l.rows, l.rowsErr = rc.readJournal(ctx) })
	l.reads.Go(func() {
		if l.recordsErr = errs.ErrUnavailable; rc.cfg.Containerd.Listens(ctx) {
			l.records, l.recordsErr = rc.cfg.Containerd.Records(ctx)
		}
	})
	return l.reads.Wait
}

// list returns all rows, and all records of containers.
func (rc *Recovery) list(ctx context.Context) (rows []*journal.Row, records []ctrd.Container, err error) {
	if l := rc.ahead; l != nil {
		rc.ahead = nil
		l.reads.Wait()
		if rows, err = l.rows, l.rowsErr; err == nil && l.recordsErr == nil {
			return rows, l.records, nil
		}
	} else {
		rows, err = rc.readJournal(ctx)
	}
	if err != nil {
		return nil, nil, err
	}
	records, err = rc.awaitRecords(ctx)
	return rows, records, err
}

// readJournal reads all rows, and records the UIDs of unreadable ones.
func (rc *Recovery) readJournal(ctx context.Context) (rows []*journal.Row, err error) {
	err = rc.cfg.Journal.Each(func(r *journal.Row) { rows = append(rows, r) }, func(key, value []byte, err error) {
		rc.cfg.Registry.SetUnread(types.UID(key), err)
		rc.cfg.Log.ErrorContext(ctx, "unreadable journal row kept, with its sandbox",
			"key", fmt.Sprintf("%q", key), "value", fmt.Sprintf("%q", value), telemetry.Error, err)
	})
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	return rows, nil
}

// awaitRecords waits for containerd, which may be starting, and lists its containers. A timeout is an errs.ErrUnavailable:
// without the list nothing is adopted.
func (rc *Recovery) awaitRecords(ctx context.Context) ([]ctrd.Container, error) {
	ctx, cancel := context.WithTimeout(ctx, rc.BootTimeout)
	defer cancel()
	for {
		records, err := rc.cfg.Containerd.Records(ctx)
		if err == nil {
			return records, nil
		}
		rc.cfg.Log.WarnContext(ctx, "adoption waits for containerd", telemetry.Error, err)
		if !lifecycle.Sleep(ctx, BootPause) {
			return nil, fmt.Errorf("adopt what runs: %w", errs.Retryable(err))
		}
	}
}

// sleepers returns the IDs of sandboxes whose memory image must be kept.
func (rc *Recovery) sleepers(rows []*journal.Row, records []ctrd.Container) map[string]bool {
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
	for id := range rc.cfg.Registry.UnreadIDs() {
		keep[id] = true
	}
	return keep
}

// eachRow calls do for the selected rows, several at once, and counts them.
func (rc *Recovery) eachRow(rows []*journal.Row, meant func(*journal.Row) bool, do func(*journal.Row)) (count int) {
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
func (rc *Recovery) claimAddress(ctx context.Context, r *journal.Row) {
	if !r.Stage.Begun() || !r.Address.IsValid() {
		return
	}
	if err := rc.cfg.Allocator.Claim(string(r.Plan.Ref.UID), r.Address); err != nil {
		rc.cfg.Log.ErrorContext(ctx, "address of a sandbox not leased to it", telemetry.Sandbox, r.Plan.Ref.Name,
			telemetry.Address, r.Address, telemetry.Error, err)
	}
}

// takeOver adopts a sandbox of the journal.
func (rc *Recovery) takeOver(ctx context.Context, u *registry.Handle, r *journal.Row) {
	rc.cfg.Supervisor.Appears(u, r)
	rc.cfg.AdoptEgress(ctx, u, r)
	switch {
	case r.Stage == journal.Ended:
		rc.cfg.Supervisor.SawEnd(u, r)
		return
	case r.Stage == journal.Restarting:
		rc.cfg.Supervisor.SeeRestart(u, "its container was being replaced when the server ended")
		rc.cfg.Supervisor.RestartLater(u, r, 0)
		return
	case r.OnDisk():
		rc.cfg.Suspender.TakeOver(ctx, u, r)
		return
	case !r.Process.Alive():
		r = rc.cfg.Maker.Uncaptured(u, r)
		rc.cfg.Supervisor.Died(ctx, u, r, rc.cfg.Supervisor.WhyDied(r, "it ended while the server was down"))
		return
	}
	work := rc.cfg.Host.Operation(r)
	if err := work.LimitCPU(ctx); err != nil { // while its memory was being saved, it had more
		rc.cfg.Log.WarnContext(ctx, "CPU limit of a sandbox not applied", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
	if r.Stage == journal.Capturing {
		r = rc.cfg.Maker.Recover(ctx, u, r)
	}
	rc.cfg.Supervisor.Watch(u, r)
	if err := rc.cfg.Network.Adopt(ctx, work.Endpoint()); err != nil {
		rc.cfg.Log.WarnContext(ctx, "network of a sandbox not adopted", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
	}
	if r.Stage == journal.Live {
		return
	}
	if r.Stage != journal.Paused { // a pause or resume was interrupted
		rc.cfg.Suspender.Settle(ctx, u, r)
	}
	if now := u.Row(); now.Stage == journal.Paused {
		rc.cfg.Suspender.SetPaused(u, now)
	}
}

// Rediscover adopts a sandbox of the journal that the registry lacks. The registry is an index of the journal; no decision
// rests on an absence from an index.
func (rc *Recovery) Rediscover(ctx context.Context, uid types.UID) error {
	if rc.cfg.Registry.Lookup(uid) != nil {
		return nil
	}
	r, err := rc.cfg.Journal.Get(uid)
	if err != nil || r == nil {
		return errs.Retryable(err)
	}
	u := rc.cfg.Registry.Of(r.Plan.Ref)
	_, done, err := u.Acquire(ctx)
	if err != nil {
		return err
	}
	r, err = rc.cfg.Journal.Get(uid) // again, with the lock held
	found := err == nil && r != nil && !u.IsRemoved() && u.Row() == nil
	if found {
		u.SetRow(r)
	} else if u.Row() == nil {
		u.MarkRemoved()
		rc.cfg.Registry.Drop(u)
	}
	done()
	if !found {
		return errs.Retryable(err)
	}
	rc.cfg.Log.ErrorContext(ctx, "sandbox of the journal was not in the registry; adopting it", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name)
	if !r.Stage.Begun() {
		rc.undoLeft(ctx, u)
		return nil
	}
	rc.claimAddress(ctx, r)
	rc.takeOver(ctx, u, r)
	return nil
}

// removeOrphanSnapshots removes snapshots without a sandbox, container record or mount: containerd may complete a request
// after its call has failed. No sandbox may be created meanwhile.
func (rc *Recovery) removeOrphanSnapshots(ctx context.Context, records []ctrd.Container) error {
	keys, err := rc.cfg.Containerd.Snapshots(ctx)
	if err != nil || len(keys) == 0 {
		return err
	}
	mounted, err := rc.cfg.Inventory.Mounts()
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
	for _, u := range rc.cfg.Registry.All() {
		used[string(u.ID)] = used[string(u.ID)] || u.Row() != nil
	}
	for id := range rc.cfg.Registry.UnreadIDs() {
		used[id] = true
	}
	var failures []error
	for _, key := range keys {
		if id, _ := ctrd.SandboxOf(key); !used[id] {
			rc.cfg.Log.InfoContext(ctx, "orphaned snapshot removed", "snapshot", key)
			failures = append(failures, rc.cfg.Containerd.RemoveSnapshot(ctx, key))
		}
	}
	return errors.Join(failures...)
}
