package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/ctrd"
	"github.com/barchan-dev/barchan/internal/oci"
	"github.com/barchan-dev/barchan/internal/sandbox"
	"github.com/barchan-dev/barchan/internal/telemetry"
)

// sweepEvery is how often the node looks for what nobody asks for and for what could not be removed.
const sweepEvery = 5 * time.Minute

// adopt finds what a node before this one left: what lives is taken over, what was half done
// is undone. Nothing is removed that might live.
func (n *Node) adopt(ctx context.Context) error {
	began := time.Now()
	var rows []*row
	asleep := map[string]bool{}
	err := n.journal.each(func(r *row) { rows = append(rows, r) }, func(key, value []byte, err error) {
		asleep[string(sandbox.IDOf(types.UID(key)))] = true // for all we know
		n.log.ErrorContext(ctx, "row of the journal cannot be read; it and its sandbox are kept",
			"key", fmt.Sprintf("%q", key), "value", fmt.Sprintf("%q", value), telemetry.Error, err)
	})
	if err != nil {
		return fmt.Errorf("read the journal: %w", err)
	}
	for _, r := range rows {
		if r.onDisk() {
			asleep[string(r.Plan.ID)] = true
		}
	}
	if err := n.dropStrayMemory(ctx, asleep); err != nil {
		n.log.WarnContext(ctx, "memory on disk that no sandbox waits for may be left", telemetry.Error, err)
	}
	lives, undone := 0, 0
	for _, r := range rows {
		u := n.unitOf(r.Plan.Ref)
		u.setRow(r)
		if r.Stage != making && r.Stage != removing {
			lives++
			n.takeOver(ctx, u, r)
		}
	}
	for _, r := range rows {
		if r.Stage == making || r.Stage == removing {
			undone++
			n.undoLeft(ctx, n.unitOf(r.Plan.Ref), r)
		}
	}
	if err := n.dropStraySnapshots(ctx); err != nil {
		n.log.WarnContext(ctx, "snapshots without a sandbox may be left", telemetry.Error, err)
	}
	n.log.InfoContext(ctx, "adopted what runs", "lives", lives, "undone", undone, telemetry.Took, time.Since(began))
	return nil
}

// takeOver makes a sandbox of the journal this node's own.
func (n *Node) takeOver(ctx context.Context, u *unit, r *row) {
	if err := n.books.Claim(string(u.ref.UID), r.Address); err != nil {
		n.log.ErrorContext(ctx, "a live sandbox's address is not its own in the books", telemetry.Sandbox, u.ref.Name,
			telemetry.Address, r.Address, telemetry.Error, err)
	}
	n.appears(u, r)
	switch {
	case r.Stage == ended:
		n.sawEnd(u, r)
		return
	case r.Stage == restarting:
		n.restartLater(u, r, 0)
		return
	case r.onDisk():
		n.takeOverStored(ctx, u, r)
		return
	case !r.Process.Alive():
		n.end(ctx, u, r, nil, "it ended while the server was down")
		return
	}
	n.watch(u, r)
	work := &work{n: n, row: r}
	if err := n.network.Adopt(ctx, work.endpoint()); err != nil {
		n.log.WarnContext(ctx, "network of a live sandbox not as it was", telemetry.Sandbox, u.ref.Name, telemetry.Error, err)
	}
	if r.Stage == live {
		return
	}
	if r.Stage != paused { // asked to pause or resume, and the answer was lost
		n.settle(ctx, u, r)
	}
	if now := u.current(); now.Stage == paused {
		n.fellAsleep(u, now)
	}
}

// settle asks the runtime whether a sandbox sleeps.
func (n *Node) settle(ctx context.Context, u *unit, r *row) {
	became := live
	runtime, err := n.runtimeOf(r.Plan.Class)
	if err == nil {
		var status oci.Status
		if status, err = runtime.State(ctx, string(u.id)); status == oci.Paused {
			became = paused
		}
	}
	if err == nil {
		if became == paused && r.PausedAt.IsZero() {
			r.PausedAt = time.Now()
		}
		err = n.note(u, r, became)
	}
	if err != nil {
		n.log.WarnContext(ctx, "state of a sandbox unknown; taken to be running", telemetry.Sandbox, u.ref.Name, telemetry.Error, err)
	}
}

// undoLeft takes back what was half done. Failing is no reason not to start: the row stays,
// its address stays taken, and the sweep or the next Ensure or Remove tries again.
func (n *Node) undoLeft(ctx context.Context, u *unit, r *row) {
	taken, done, err := u.take(ctx)
	if err != nil {
		return
	}
	defer done()
	limited, cancel := context.WithTimeout(taken, undoTimeout)
	defer cancel()
	if err := n.clear(limited, u, r); err != nil {
		n.log.WarnContext(ctx, "sandbox left half made cannot be removed yet", telemetry.Sandbox, u.ref.Name, telemetry.Error, err)
		return
	}
	u.bury()
	n.drop(u)
}

// sweep looks now and then for what could not be removed, and for what nobody asks for.
func (n *Node) sweep(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			n.Sweep(ctx)
		}
	}
}

// Sweep tries again to remove what could not be removed, and removes sandboxes that nobody
// has asked for since the start if the source of truth clearly says that they do not exist.
// Run calls it every few minutes.
func (n *Node) Sweep(ctx context.Context) {
	for _, u := range n.allUnits() {
		switch r := u.current(); {
		case r == nil:
		case r.Stage == removing:
			n.undoLeft(ctx, u, r)
		case r.onDisk() && r.Stage != stored:
			n.layToRest(ctx, u)
		}
	}
	for _, ref := range n.orphans(ctx) {
		if n.cfg.Exists == nil {
			return
		}
		exists, err := n.cfg.Exists(ctx, ref)
		if err != nil || exists {
			continue
		}
		n.log.InfoContext(ctx, "removing a sandbox that does not exist any more", telemetry.Namespace, ref.Namespace, telemetry.Sandbox, ref.Name)
		if err := n.Remove(ctx, ref); err != nil {
			n.log.WarnContext(ctx, "orphan not removed", telemetry.Sandbox, ref.Name, telemetry.Error, err)
		}
	}
}

// dropStraySnapshots removes snapshots that no sandbox, record or mount knows: containerd may
// do what it was asked long after the call for it has failed. Nothing may be in the making.
func (n *Node) dropStraySnapshots(ctx context.Context) error {
	keys, err := n.cfg.Containerd.Snapshots(ctx)
	if err != nil || len(keys) == 0 {
		return err
	}
	records, err := n.cfg.Containerd.Records(ctx)
	if err != nil {
		return err
	}
	mounted, err := mountsBelow(filepath.Join(n.cfg.DataDir, "sandboxes"))
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
	for _, u := range n.allUnits() {
		used[string(u.id)] = used[string(u.id)] || u.current() != nil
	}
	var failures []error
	for _, key := range keys {
		if !used[key] {
			n.log.InfoContext(ctx, "removing a snapshot without a sandbox", "snapshot", key)
			failures = append(failures, n.cfg.Containerd.RemoveSnapshot(ctx, key))
		}
	}
	return errors.Join(failures...)
}

// orphans are sandboxes that nobody has asked for: of the journal, and of containers' records.
func (n *Node) orphans(ctx context.Context) (refs []sandbox.Ref) {
	known := map[types.UID]bool{}
	for _, u := range n.allUnits() {
		known[u.ref.UID] = true
		if !u.isClaimed() {
			refs = append(refs, u.ref)
		}
	}
	records, err := n.cfg.Containerd.Records(ctx)
	if err != nil {
		n.log.WarnContext(ctx, "records not looked at", telemetry.Error, err)
		return refs
	}
	for _, r := range records {
		if ref := refOfRecord(r); ref.UID != "" && !known[ref.UID] && !slices.Contains(refs, ref) && n.lookup(ref.UID) == nil {
			refs = append(refs, ref)
		}
	}
	return refs
}

func refOfRecord(r ctrd.Record) sandbox.Ref {
	return sandbox.Ref{Namespace: r.Labels[labelNamespace], Name: r.Labels[labelName], UID: types.UID(r.Labels[labelSandbox])}
}

// Destroy removes every sandbox, whoever wants it, and the instance's network. Run must have
// returned, and the node must not be used afterwards but for Close.
func (n *Node) Destroy(ctx context.Context) error {
	var failures []error
	err := n.journal.each(func(r *row) {
		u := n.unitOf(r.Plan.Ref)
		u.setRow(r)
	}, func(key, _ []byte, err error) { failures = append(failures, fmt.Errorf("row %q: %w", key, err)) })
	failures = append(failures, err)
	for _, u := range n.allUnits() {
		if r := u.current(); r != nil {
			failures = append(failures, n.clear(ctx, u, r))
		}
	}
	failures = append(failures, n.dropStraySnapshots(ctx))
	for _, r := range n.runtimes {
		failures = append(failures, r.Destroy())
	}
	failures = append(failures, n.network.Destroy(ctx), oci.RemoveCgroups(n.cfg.CgroupParent))
	return errors.Join(failures...)
}
