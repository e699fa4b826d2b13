package node

import (
	"context"

	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Capture makes a checkpoint of a sandbox; see capture.Maker.
func (n *Node) Capture(ctx context.Context, ask sandbox.Capture) (sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Captured{}, err
	}
	return n.maker.Capture(ctx, ask)
}

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

// ExportCheckpoint describes a checkpoint as an artifact; see transfer.
func (n *Node) ExportCheckpoint(
	ctx context.Context, ref sandbox.CheckpointRef, config portable.Config, withImage bool, progress func(done, total int64),
) (_ *portable.Layout, release func(), err error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, nil, err
	}
	return n.transfer.Export(ctx, ref, config, withImage, progress)
}

// ImportCheckpoint makes a checkpoint of an artifact; see transfer.
func (n *Node) ImportCheckpoint(ctx context.Context, ref sandbox.CheckpointRef, in *portable.Reader) (sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Captured{}, err
	}
	return n.transfer.Import(ctx, ref, in)
}

// CheckImport refuses an artifact that can never be used here; see transfer.
func (n *Node) CheckImport(ctx context.Context, h *portable.Head) (warnings []string, err error) {
	return n.transfer.CheckImport(ctx, h)
}

// ImageUsers are the sandboxes and checkpoints of the node that were made from the image of a digest,
// and that need it: those that have ended do not.
func (n *Node) ImageUsers(ctx context.Context, of string) ([]sandbox.Ref, []sandbox.CheckpointRef, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, nil, err
	}
	return n.imageUsers(of), n.checkpoints.OfImage(of, nil), nil
}
