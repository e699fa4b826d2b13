package node

import (
	"context"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Captured is what the node has of a checkpoint. A missing or incomplete one is an
// errs.ErrNotFound; one that is being written now, or whose row cannot be read, is an errs.ErrUnavailable.
func (n *Node) Captured(ctx context.Context, ref sandbox.CheckpointRef) (sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Captured{}, err
	}
	return n.checkpoints.CapturedOf(ref)
}

// Checkpoints are all complete checkpoints on the node, in no order.
func (n *Node) Checkpoints(ctx context.Context) ([]sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	return n.checkpoints.Complete(), nil
}

// DropCheckpoint removes a checkpoint, also while it is being made. It returns nil only when nothing
// of it is left; repeating it is harmless. No sandbox can be made from it from now on. It waits for those that
// are being made: where that takes longer than ctx, it is an errs.ErrUnavailable.
func (n *Node) DropCheckpoint(ctx context.Context, ref sandbox.CheckpointRef) error {
	if err := n.awaitAdopted(ctx); err != nil {
		return err
	}
	return n.checkpoints.Remove(ctx, ref)
}
