package node

import (
	"context"
	"io"

	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/transfer"
)

// Capture makes a checkpoint of a sandbox; see capture.Maker.
func (n *Node) Capture(ctx context.Context, ask sandbox.Capture) (sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Captured{}, err
	}
	return n.maker.Capture(ctx, ask)
}

// Captured returns a checkpoint of the node. A missing or incomplete one is an errs.ErrNotFound; one that is being written,
// or whose row cannot be read, is an errs.ErrUnavailable.
func (n *Node) Captured(ctx context.Context, ref sandbox.CheckpointRef) (sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Captured{}, err
	}
	return n.checkpoints.CapturedOf(ref)
}

// Checkpoints returns all complete checkpoints of the node, in no order.
func (n *Node) Checkpoints(ctx context.Context) ([]sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	return n.checkpoints.Complete(), nil
}

// DropCheckpoint removes a checkpoint, and interrupts its capture. It returns nil only when nothing of it is left. It may be
// repeated. No restore from it can begin from now on; it waits for those in progress, and returns an errs.ErrUnavailable if
// ctx ends first.
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

// CheckImport rejects an artifact that can never be used here; see transfer.
func (n *Node) CheckImport(ctx context.Context, h *portable.Head) (warnings []string, err error) {
	return n.transfer.CheckImport(ctx, h)
}

// ExportImage writes an image as a tar; see transfer.
func (n *Node) ExportImage(ctx context.Context, x transfer.ImageExport, w io.Writer) error {
	if err := n.awaitAdopted(ctx); err != nil {
		return err
	}
	return n.transfer.ExportImage(ctx, x, w)
}

// ImageUsers returns the sandboxes and checkpoints of the node that need the image of a digest; ended sandboxes do not.
func (n *Node) ImageUsers(ctx context.Context, of string) ([]sandbox.Ref, []sandbox.CheckpointRef, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, nil, err
	}
	return n.imageUsers(of), n.checkpoints.OfImage(of, nil), nil
}
