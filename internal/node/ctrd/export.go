package ctrd

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
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
		if top, err = c.exported(ctx, base, x, l); err != nil {
			return kind(action, err)
		}
	}
	top.Platform = nil // of an entry in an index that is not written
	return kind(action, c.api.Export(ctx, w, archive.WithManifest(top, x.Name)))
}

// exported writes the manifest of an image with more layers.
func (c *Client) exported(ctx context.Context, base Content, x ImageExport, lease leases.Lease) (top ocispec.Descriptor, err error) {
	store := c.api.ContentStore()
	var m ocispec.Manifest
	if err := json.Unmarshal(base.Raw, &m); err != nil {
		return top, fmt.Errorf("its manifest: %w: %w", err, errs.ErrInvalid)
	}
	text, err := content.ReadBlob(ctx, store, m.Config)
	if err != nil {
		return top, err
	}
	var config ocispec.Image
	if err := json.Unmarshal(text, &config); err != nil {
		return top, fmt.Errorf("its configuration: %w: %w", err, errs.ErrInvalid)
	}
	layerType := ocispec.MediaTypeImageLayerGzip
	if m.Config.MediaType == dockerConfig { // one of a manifest is like the others
		layerType = dockerLayer
	}
	for i, layer := range x.Layers {
		info, err := c.stat(ctx, layer.Snapshot)
		if err != nil {
			return top, err
		}
		d, diff, err := c.writeLayer(ctx, layer.Snapshot, i, lease)
		if err != nil {
			return top, err
		}
		d.MediaType = layerType
		m.Layers = append(m.Layers, d)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, diff)
		config.History = append(config.History, ocispec.History{Created: &info.Created, CreatedBy: layer.CreatedBy, Comment: "barchan"})
	}
	if x.Change != nil {
		x.Change(&config)
	}
	configType := m.Config.MediaType
	if m.Config, err = c.writeJSON(ctx, configType, config, lease); err != nil {
		return top, err
	}
	m.Versioned, m.Annotations = specs.Versioned{SchemaVersion: 2}, nil
	m.MediaType = base.Manifest.MediaType
	return c.writeJSON(ctx, base.Manifest.MediaType, m, lease)
}

const (
	dockerConfig = "application/vnd.docker.container.image.v1+json"
	dockerLayer  = "application/vnd.docker.image.rootfs.diff.tar.gzip"
)

func (c *Client) writeJSON(ctx context.Context, mediaType string, v any, lease leases.Lease) (d ocispec.Descriptor, err error) {
	text, err := json.Marshal(v)
	if err != nil {
		return d, err
	}
	d = ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(text), Size: int64(len(text))}
	write := func() error {
		return content.WriteBlob(ctx, c.api.ContentStore(), "barchan-export-"+lease.ID+d.Digest.String(), bytes.NewReader(text), d)
	}
	return d, c.held(ctx, lease, d.Digest, write)
}

// held writes a blob that is kept by a lease. One that there was already may be collected until the lease has it, and is then
// written again.
func (c *Client) held(ctx context.Context, lease leases.Lease, blob digest.Digest, write func() error) error {
	for try := 0; ; try++ {
		if err := write(); err != nil {
			return err
		}
		if err := c.api.LeasesService().AddResource(ctx, lease, leases.Resource{ID: blob.String(), Type: "content"}); err != nil && !errdefs.IsAlreadyExists(err) {
			return err
		}
		if _, err := c.api.ContentStore().Info(ctx, blob); err == nil || !errdefs.IsNotFound(err) || try > 0 {
			return err
		}
	}
}

// writeLayer writes a committed snapshot as a compressed layer, and returns the digest of its uncompressed content too.
func (c *Client) writeLayer(ctx context.Context, snapshot string, i int, lease leases.Lease) (d ocispec.Descriptor, diff digest.Digest, err error) {
	for try := 0; ; try++ {
		d, diff, err = c.packLayer(ctx, snapshot, fmt.Sprintf("barchan-export-%s-%d-%d", lease.ID, i, try))
		if err != nil {
			return d, "", err
		}
		err = c.held(ctx, lease, d.Digest, func() error { return nil })
		if !errdefs.IsNotFound(err) || try > 0 {
			return d, diff, err
		}
	}
}

func (c *Client) packLayer(ctx context.Context, snapshot, ref string) (d ocispec.Descriptor, diff digest.Digest, err error) {
	out, err := content.OpenWriter(ctx, c.api.ContentStore(), content.WithRef(ref))
	if err != nil {
		return d, "", err
	}
	defer func() { _ = out.Close() }()
	buffered, hash := bufio.NewWriterSize(out, 1<<20), digest.SHA256.Digester()
	packed, err := gzip.NewWriterLevel(buffered, gzip.BestSpeed)
	if err != nil {
		return d, "", err
	}
	if err := c.ExportCommitted(ctx, snapshot, io.MultiWriter(packed, hash.Hash())); err != nil {
		return d, "", err
	}
	if err := errors.Join(packed.Close(), buffered.Flush()); err != nil {
		return d, "", err
	}
	status, err := out.Status()
	if err != nil {
		return d, "", err
	}
	d.Digest, d.Size = out.Digest(), status.Offset
	if err := out.Commit(ctx, d.Size, d.Digest); err != nil && !errdefs.IsAlreadyExists(err) {
		return d, "", err
	}
	return d, hash.Digest(), nil
}
