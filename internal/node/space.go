package node

import (
	"context"
	"time"

	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// refused says why nothing that takes room may be begun, if so.
func (n *Node) refused() error {
	return n.cfg.Refuse()
}

// roomToCapture says why a checkpoint may not be made now for want of room, if so. It asks for all that
// will be written at once: what there is room for in parts may not fit as a whole. Memory on disk is
// shared and takes none; the volumes of a sandbox are not counted.
func (n *Node) roomToCapture(ctx context.Context, r *journal.Row, filesOnly bool) error {
	bytes, err := n.cfg.Containerd.SnapshotUsage(ctx, string(r.Plan.ID))
	if err != nil {
		return err
	}
	if !filesOnly && !r.OnDisk() {
		memory, err := n.host.MemoryOf(r)
		if err != nil {
			return err
		}
		bytes += memory
	}
	return n.cfg.CheckSpace(n.checkpoints.Root(), bytes)
}

// observeStep reports how long something took.
func (n *Node) observeStep(class oci.Class, step string, took time.Duration) {
	n.cfg.ObserveStep(string(class), step, took)
}
