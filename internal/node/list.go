package node

import (
	"context"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// A measurement of disk usage walks all files that a sandbox has written. It is reused for diskFresh, and for diskRest times
// its duration.
const (
	diskFresh = 5 * time.Second
	diskRest  = 10
)

// DiskUsed returns the bytes that a sandbox has written to the roots of its containers, up to some seconds old. One that is not on
// the node is an errs.ErrNotFound.
func (n *Node) DiskUsed(ctx context.Context, ref sandbox.Ref) (int64, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return 0, err
	}
	u := n.handles.Lookup(ref.UID)
	var r *journal.Row
	if u != nil {
		r = u.Row()
	}
	if r == nil {
		return 0, fmt.Errorf("sandbox %s/%s is not on this node: %w", ref.Namespace, ref.Name, errs.ErrNotFound)
	}
	if r.Disk > 0 {
		return n.host.DiskUsed(ctx, r)
	}
	if known := u.DiskUse(); time.Now().Before(known.Until) {
		return known.Bytes, nil
	}
	_, err, _ := n.measuring.Do(string(u.ID), func() (any, error) {
		began := time.Now()
		bytes, err := n.host.DiskUsed(context.WithoutCancel(ctx), r) // it has its own timeout
		if err == nil {
			u.SetDiskUse(registry.DiskUse{Bytes: bytes, Until: time.Now().Add(max(diskFresh, diskRest*time.Since(began)))})
		}
		return nil, err
	})
	return u.DiskUse().Bytes, err
}

// Status is a sandbox and its observed state.
type Status struct {
	Ref      sandbox.Ref
	Observed sandbox.Observed
}

// List returns all sandboxes of the node, in no order.
func (n *Node) List(ctx context.Context) ([]Status, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	var all []Status
	for _, u := range n.handles.All() {
		all = append(all, Status{Ref: u.Ref, Observed: u.Observed()})
	}
	return all, nil
}

// JournalSummary returns the rows of the journal without their content, also before Run has adopted them.
func (n *Node) JournalSummary() ([]journal.Summary, error) { return n.journal.Summaries() }

// observeStep records the duration of a step.
func (n *Node) observeStep(class oci.Class, step string, took time.Duration) {
	n.cfg.ObserveStep(string(class), step, took)
}
