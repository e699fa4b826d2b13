package transfer

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
// errs.ErrNotFound, there is no such image or checkpoint on the node; errs.ErrConflict, it is being made or removed; errs.ErrInvalid, it has several containers;
// errs.ErrExhausted, there is no space for the compressed layers.
func (x *Transfer) ExportImage(ctx context.Context, what ImageExport, w io.Writer) error {
	out := ctrd.ImageExport{Name: what.Name, Change: what.Change}
	if what.Checkpoint == nil {
		img, err := x.cfg.Containerd.Resolve(ctx, what.Ref)
		if err != nil {
			return err
		}
		out.Digest = img.Digest
		return x.cfg.Containerd.ExportImage(ctx, out, w)
	}
	c, release, err := x.open(*what.Checkpoint)
	if err != nil {
		return err
	}
	defer release()
	if err := x.cfg.CheckSpace(x.cfg.Checkpoints.Root(), c.FilesSize); err != nil {
		return err
	}
	names, chain, err := x.cfg.Containerd.SnapshotsAbove(ctx, checkpoint.Snapshot(c.Ref.UID, ""))
	if err != nil {
		return err
	}
	base, err := x.cfg.Containerd.ImageContent(ctx, c.Digest)
	if err != nil {
		return fmt.Errorf("image of checkpoint %s/%s: %w", c.Ref.Namespace, c.Ref.Name, err)
	}
	if base.Chain != chain {
		return fmt.Errorf("files of checkpoint %s/%s are based on %s, but image %s is %s: %w", c.Ref.Namespace, c.Ref.Name, chain, c.Digest, base.Chain, errs.ErrConflict)
	}
	if what.WithoutMemory && c.Memory != nil {
		names = names[:len(names)-1]
	}
	out.Digest = c.Digest
	for i, name := range names {
		layer := ctrd.ExportLayer{Snapshot: name, CreatedBy: "# files of a checkpoint"}
		if at := len(what.History) - len(names) + i; at >= 0 {
			layer.CreatedBy = what.History[at]
		}
		out.Layers = append(out.Layers, layer)
	}
	return x.cfg.Containerd.ExportImage(ctx, out, w)
}
