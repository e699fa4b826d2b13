package node

import (
	"context"

	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// refused says why nothing that takes room may be begun, if so.
func (n *Node) refused() error {
	return n.cfg.Refuse()
}

// roomToStore says why the memory of a frozen sandbox may not be written now, if so: the write would
// take what is kept for all the others.
func (n *Node) roomToStore(r *journal.Row) error {
	memory, err := n.memoryOf(r)
	if err != nil {
		return err
	}
	return n.cfg.CheckSpace(n.cfg.MemoryDir, memory)
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
		memory, err := n.memoryOf(r)
		if err != nil {
			return err
		}
		bytes += memory
	}
	return n.cfg.CheckSpace(n.checkpoints.Root(), bytes)
}

// memoryOf is how many bytes the memory of a sandbox that runs or is frozen takes at most if it is written
// now. That is known only then; what the sandbox has of RAM, with the cache of files it uses, is an upper
// bound.
func (n *Node) memoryOf(r *journal.Row) (int64, error) {
	used, err := cgroups.ReadUsage(n.cgroup(string(r.Plan.ID)))
	if err != nil {
		return 0, errs.Retryable(err)
	}
	return int64(used.Memory), nil //nolint:gosec // no machine has as much
}
