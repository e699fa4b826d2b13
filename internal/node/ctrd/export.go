package ctrd

import (
	"context"
	"io"
	"slices"

	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/node/ctrd/ociimage"
)

// ImageExport is an image that is to be written.
type ImageExport struct {
	// Digest is that of a local image, Name the one that the result has.
	Digest, Name string
	// Layers lie on it, the lowest first.
	Layers []ExportLayer
	// Change changes the configuration; nil: it stays.
	Change func(*ocispec.Image)
}

// ExportLayer is a committed snapshot as a layer of an image.
type ExportLayer struct {
	Snapshot string
	// CreatedBy is for the image's history.
	CreatedBy string
}

// SnapshotsAbove returns the committed snapshots from the image below one up to itself, the lowest first, and the layers of
// that image.
func (c *Client) SnapshotsAbove(ctx context.Context, name string) (names []string, chain digest.Digest, err error) {
	for at := name; at != ""; {
		info, err := c.stat(ctx, at)
		if err != nil {
			return nil, "", kind("find snapshots below "+name, err)
		}
		if info.Labels[labelCommitted] == "" {
			chain = digest.Digest(at)
			break
		}
		names, at = append(names, at), info.Parent
	}
	slices.Reverse(names)
	return names, chain, nil
}

// ExportImage writes an image for this platform as a tar: an OCI layout that is what `docker save` makes, too. It first writes
// the layers of snapshots to containerd, which keeps them until it returns. Missing content is an errs.ErrNotFound.
func (c *Client) ExportImage(ctx context.Context, x ImageExport, w io.Writer) error {
	action := "export image " + x.Name
	l, err := c.lease(ctx)
	if err != nil {
		return kind(action, err)
	}
	defer c.release(ctx, l)
	ctx = leases.WithLease(ctx, l.ID)
	base, err := c.ImageContent(ctx, x.Digest)
	if err != nil {
		return err
	}
	top := base.Manifest
	if len(x.Layers) > 0 || x.Change != nil {
		layers := make([]ociimage.Layer, 0, len(x.Layers))
		for _, layer := range x.Layers {
			info, err := c.stat(ctx, layer.Snapshot)
			if err != nil {
				return kind(action, err)
			}
			layers = append(layers, ociimage.Layer{Created: &info.Created, CreatedBy: layer.CreatedBy, Write: func(w io.Writer) error {
				return c.ExportCommitted(ctx, layer.Snapshot, w)
			}})
		}
		writer := ociimage.Writer{Store: c.api.ContentStore(), Leases: c.api.LeasesService(), Lease: l}
		if top, err = writer.Extend(ctx, base.Manifest, base.Raw, layers, x.Change); err != nil {
			return kind(action, err)
		}
	}
	top.Platform = nil // of an entry in an index that is not written
	return kind(action, c.api.Export(ctx, w, archive.WithManifest(top, x.Name)))
}
