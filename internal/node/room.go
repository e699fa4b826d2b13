package node

import (
	"context"

	"github.com/barchan-dev/barchan/internal/oci"
)

// refused says why nothing that takes room may be begun, if so.
func (n *Node) refused() error {
	if n.cfg.Refuse == nil {
		return nil
	}
	return n.cfg.Refuse()
}

// roomForMemory says why the memory of a sandbox that runs or is frozen may not be written below
// dir now, if so: the write would take what is kept for all the others. Its size is known only when it
// is written; what the sandbox has of RAM, with the cache of files it uses, is an upper bound.
func (n *Node) roomForMemory(r *row, dir string) error {
	if n.cfg.Room == nil {
		return nil
	}
	used, err := oci.ReadUsage(n.cgroup(string(r.Plan.ID)))
	if err != nil {
		return unavailable(err)
	}
	return n.cfg.Room(dir, int64(used.Memory)) //nolint:gosec // no machine has as much
}

// roomToCapture says why a checkpoint may not be made now for want of room, if so. Memory on disk is
// shared and takes none; the volumes of a sandbox are not counted.
func (n *Node) roomToCapture(ctx context.Context, r *row, filesOnly bool) error {
	if n.cfg.Room == nil {
		return nil
	}
	if !filesOnly && !r.onDisk() {
		if err := n.roomForMemory(r, n.checkpointsDir()); err != nil {
			return err
		}
	}
	files, err := n.cfg.Containerd.SnapshotUsage(ctx, string(r.Plan.ID))
	if err != nil {
		return err
	}
	return n.cfg.Room(n.checkpointsDir(), files)
}
