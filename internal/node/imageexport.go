package node

import (
	"context"
	"fmt"
	"io"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
)

// ImageExport is what ExportImage writes: a local image, or the files of a checkpoint on its image.
type ImageExport struct {
	// Name is the image's in the result.
	Name string
	// Ref is a local image. Checkpoint, unless it is nil, is taken in its place.
	Ref        string
	Checkpoint *sandbox.CheckpointRef
	// WithoutMemory leaves out what programs have written whose memory the checkpoint has.
	WithoutMemory bool
	// History has what made the uppermost layers of the checkpoint, the highest last.
	History []string
	// Change changes the configuration; nil: it stays.
	Change func(*ocispec.Image)
}

// ExportImage writes an image as a tar; see ctrd.ExportImage. The checkpoint is not removed meanwhile. Errors:
// errs.ErrNotFound, there is no such image or checkpoint on the node; errs.ErrConflict, it is being made or removed;
// errs.ErrExhausted, there is no space for the compressed layers.
func (n *Node) ExportImage(ctx context.Context, x ImageExport, w io.Writer) error {
	if err := n.awaitAdopted(ctx); err != nil {
		return err
	}
	out := ctrd.ImageExport{Name: x.Name, Change: x.Change}
	if x.Checkpoint == nil {
		img, err := n.cfg.Containerd.Resolve(ctx, x.Ref)
		if err != nil {
			return err
		}
		out.Digest = img.Digest
		return n.cfg.Containerd.ExportImage(ctx, out, w)
	}
	k := n.checkpoints.Find(x.Checkpoint.UID)
	if k == nil {
		return fmt.Errorf("checkpoint %s/%s is not on this node: %w", x.Checkpoint.Namespace, x.Checkpoint.Name, errs.ErrNotFound)
	}
	c, release, ok := k.Open()
	if !ok {
		return fmt.Errorf("checkpoint %s/%s is being made or removed: %w", x.Checkpoint.Namespace, x.Checkpoint.Name, errs.ErrConflict)
	}
	defer release()
	if err := n.cfg.CheckSpace(n.cfg.DataDir, c.FilesSize); err != nil {
		return err
	}
	names, chain, err := n.cfg.Containerd.SnapshotsAbove(ctx, checkpoint.Snapshot(c.Ref.UID))
	if err != nil {
		return err
	}
	base, err := n.cfg.Containerd.ImageContent(ctx, c.Digest)
	if err != nil {
		return fmt.Errorf("image of checkpoint %s/%s: %w", c.Ref.Namespace, c.Ref.Name, err)
	}
	if base.Chain != chain {
		return fmt.Errorf("files of checkpoint %s/%s are based on %s, but image %s is %s: %w", c.Ref.Namespace, c.Ref.Name, chain, c.Digest, base.Chain, errs.ErrConflict)
	}
	if x.WithoutMemory && c.Memory != nil {
		names = names[:len(names)-1]
	}
	out.Digest = c.Digest
	for i, name := range names {
		layer := ctrd.ExportLayer{Snapshot: name, CreatedBy: "# files of a checkpoint"}
		if at := len(x.History) - len(names) + i; at >= 0 {
			layer.CreatedBy = x.History[at]
		}
		out.Layers = append(out.Layers, layer)
	}
	return n.cfg.Containerd.ExportImage(ctx, out, w)
}
