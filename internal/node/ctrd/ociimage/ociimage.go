// Package ociimage writes images to containerd's content store that are others with more layers. It reads no snapshots and names no
// image.
package ociimage

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Writer writes to a content store. The lease keeps what is written; the contexts of calls carry it too.
type Writer struct {
	Store  content.Store
	Leases leases.Manager
	Lease  leases.Lease
}

// Layer is one more layer.
type Layer struct {
	Created *time.Time
	// CreatedBy is for the image's history.
	CreatedBy string
	// Write writes the layer as a tar, the same each time.
	Write func(w io.Writer) error
}

// Extend writes an image that has the layers on those of another, by its manifest for one platform, the lowest first. change changes the
// configuration; nil: it stays.
func (w *Writer) Extend(ctx context.Context, base ocispec.Descriptor, raw []byte, layers []Layer, change func(*ocispec.Image)) (top ocispec.Descriptor, err error) {
	var m ocispec.Manifest
	if err := json.Unmarshal(raw, &m); err != nil {
		return top, fmt.Errorf("its manifest: %w: %w", err, errs.ErrInvalid)
	}
	text, err := content.ReadBlob(ctx, w.Store, m.Config)
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
	for i, layer := range layers {
		d, diff, err := w.writeLayer(ctx, layer, i)
		if err != nil {
			return top, err
		}
		d.MediaType = layerType
		m.Layers = append(m.Layers, d)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, diff)
		config.History = append(config.History, ocispec.History{Created: layer.Created, CreatedBy: layer.CreatedBy, Comment: "barchan"})
	}
	if change != nil {
		change(&config)
	}
	configType := m.Config.MediaType
	if m.Config, err = w.writeJSON(ctx, configType, config); err != nil {
		return top, err
	}
	m.Versioned, m.Annotations = specs.Versioned{SchemaVersion: 2}, nil
	m.MediaType = base.MediaType
	return w.writeJSON(ctx, base.MediaType, m)
}

const (
	dockerConfig = "application/vnd.docker.container.image.v1+json"
	dockerLayer  = "application/vnd.docker.image.rootfs.diff.tar.gzip"
)

func (w *Writer) writeJSON(ctx context.Context, mediaType string, v any) (d ocispec.Descriptor, err error) {
	text, err := json.Marshal(v)
	if err != nil {
		return d, err
	}
	d = ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(text), Size: int64(len(text))}
	write := func() error {
		return content.WriteBlob(ctx, w.Store, "barchan-export-"+w.Lease.ID+d.Digest.String(), bytes.NewReader(text), d)
	}
	return d, w.held(ctx, d.Digest, write)
}

// held writes a blob that is kept by the lease. One that there was already may be collected until the lease has it, and is then
// written again.
func (w *Writer) held(ctx context.Context, blob digest.Digest, write func() error) error {
	for try := 0; ; try++ {
		if err := write(); err != nil {
			return err
		}
		if err := w.Leases.AddResource(ctx, w.Lease, leases.Resource{ID: blob.String(), Type: "content"}); err != nil && !errdefs.IsAlreadyExists(err) {
			return err
		}
		if _, err := w.Store.Info(ctx, blob); err == nil || !errdefs.IsNotFound(err) || try > 0 {
			return err
		}
	}
}

// writeLayer writes a compressed layer, and returns the digest of its uncompressed content too.
func (w *Writer) writeLayer(ctx context.Context, layer Layer, i int) (d ocispec.Descriptor, diff digest.Digest, err error) {
	for try := 0; ; try++ {
		d, diff, err = w.packLayer(ctx, layer, fmt.Sprintf("barchan-export-%s-%d-%d", w.Lease.ID, i, try))
		if err != nil {
			return d, "", err
		}
		err = w.held(ctx, d.Digest, func() error { return nil })
		if !errdefs.IsNotFound(err) || try > 0 {
			return d, diff, err
		}
	}
}

func (w *Writer) packLayer(ctx context.Context, layer Layer, ref string) (d ocispec.Descriptor, diff digest.Digest, err error) {
	out, err := content.OpenWriter(ctx, w.Store, content.WithRef(ref))
	if err != nil {
		return d, "", err
	}
	defer func() { _ = out.Close() }()
	buffered, hash := bufio.NewWriterSize(out, 1<<20), digest.SHA256.Digester()
	packed, err := gzip.NewWriterLevel(buffered, gzip.BestSpeed)
	if err != nil {
		return d, "", err
	}
	if err := layer.Write(io.MultiWriter(packed, hash.Hash())); err != nil {
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
