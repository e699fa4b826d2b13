package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// imageFile describes an image in its directory.
const imageFile = "image.json"

// Export describes a checkpoint as an artifact, for which it reads all of it once; config has the fields that
// the node does not know. With withImage the base image is part of it. Until release is called, the
// checkpoint is not removed. progress receives the bytes read and the approximate total. Errors:
// errs.ErrNotFound, the node has no such checkpoint, or no longer its image; errs.ErrInvalid, it has files
// that an artifact cannot contain, or several containers; errs.ErrUnavailable.
func (x *Transfer) Export(
	ctx context.Context, ref sandbox.CheckpointRef, config portable.Config, withImage bool, progress func(done, total int64),
) (_ *portable.Layout, release func(), err error) {
	if err := x.cfg.Checkpoints.CheckRead(ref); err != nil {
		return nil, nil, err
	}
	c, release, err := x.open(ref)
	if err != nil {
		return nil, nil, err
	}
	l, err := x.export(ctx, c, config, withImage, progress)
	if err != nil {
		release()
		return nil, nil, errs.Retryable(fmt.Errorf("export checkpoint %s/%s: %w", ref.Namespace, ref.Name, err))
	}
	return l, release, nil
}

// open returns a checkpoint, which is not removed until release is called.
func (x *Transfer) open(ref sandbox.CheckpointRef) (c *checkpoint.Row, release func(), err error) {
	k := x.cfg.Checkpoints.Find(ref.UID)
	if k == nil {
		return nil, nil, fmt.Errorf("checkpoint %s/%s is not on this node: %w", ref.Namespace, ref.Name, errs.ErrNotFound)
	}
	c, release, ok := k.Open()
	if !ok {
		return nil, nil, fmt.Errorf("checkpoint %s/%s is being created or removed: %w", ref.Namespace, ref.Name, errs.ErrConflict)
	}
	if n := len(c.Plan.Names()); n > 1 {
		release()
		return nil, nil, fmt.Errorf("checkpoint %s/%s has the files of %d containers, and an export those of one: %w", ref.Namespace, ref.Name, n, errs.ErrInvalid)
	}
	return c, release, nil
}

func (x *Transfer) export(
	ctx context.Context, c *checkpoint.Row, config portable.Config, withImage bool, progress func(done, total int64),
) (*portable.Layout, error) {
	if c.ImageRun == nil {
		return nil, fmt.Errorf("written by a version without export: %w", errs.ErrInvalid)
	}
	chain, err := x.cfg.Containerd.ChainOf(ctx, checkpoint.Snapshot(c.Ref.UID, ""))
	if err != nil {
		return nil, err
	}
	config.Created, config.Architecture, config.Class, config.FilesSize = c.Created, runtime.GOARCH, string(c.Plan.Class), c.FilesSize
	config.Image = portable.Image{Reference: c.ImageRun.Ref, Digest: c.Digest, Chain: chain}
	if m := c.Memory; m != nil {
		config.Memory = &portable.Memory{
			Size: m.Size, Digest: m.Digest, RuntimeVersion: m.Build.Version, RuntimeSHA256: m.Build.SHA256, CPUFeatures: slices.Clone(m.Build.CPUFeatures),
		}
	}
	own := *c
	own.Plan.Restore = nil
	if config.Node, err = json.Marshal(&own); err != nil {
		return nil, fmt.Errorf("describe artifact: %w", err)
	}
	base, content, err := x.exportImage(ctx, c, chain.String(), withImage)
	if err != nil {
		return nil, err
	}
	layers, err := x.exportLayers(ctx, c, progress)
	if err != nil {
		return nil, err
	}
	return portable.NewLayout(config, base, content, layers)
}

// exportImage finds the content of the base image.
func (x *Transfer) exportImage(ctx context.Context, c *checkpoint.Row, chain string, with bool) (*portable.BaseImage, func(ocispec.Descriptor) portable.Content, error) {
	if !with {
		return nil, nil, nil
	}
	found, err := x.cfg.Containerd.ImageContent(ctx, c.Digest)
	if errors.Is(err, errs.ErrNotFound) {
		return nil, nil, fmt.Errorf("image %s (%s) is no longer on this node; export without the image: %w", c.ImageRun.Ref, c.Digest, err)
	} else if err != nil {
		return nil, nil, err
	}
	if found.Chain.String() != chain {
		return nil, nil, fmt.Errorf("files are based on %s, but image %s is %s; export without the image: %w", chain, c.Digest, found.Chain, errs.ErrConflict)
	}
	return &portable.BaseImage{Descriptor: plain(found.Manifest), Manifest: found.Raw}, func(d ocispec.Descriptor) portable.Content {
		return func(ctx context.Context, w io.Writer) error { return x.cfg.Containerd.WriteContent(ctx, d, w) }
	}, nil
}

// plain is a descriptor without annotations and URLs of others.
func plain(d ocispec.Descriptor) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: d.MediaType, Digest: d.Digest, Size: d.Size, Platform: d.Platform}
}

// exportLayers measures the parts of a checkpoint.
func (x *Transfer) exportLayers(ctx context.Context, c *checkpoint.Row, progress func(done, total int64)) (layers []portable.Layer, err error) {
	read := &countingWriter{total: c.Size(), progress: progress}
	add := func(mediaType, title string, content portable.Content) {
		if err != nil {
			return
		}
		var l portable.Layer
		l, err = portable.Measure(ctx, mediaType, title, func(ctx context.Context, w io.Writer) error {
			return content(ctx, io.MultiWriter(w, read))
		})
		if err != nil {
			err = fmt.Errorf("%s %s: %w", mediaType, title, err)
		}
		l.Content = content
		layers = append(layers, l)
	}
	add(portable.FilesType, "", func(ctx context.Context, w io.Writer) error {
		return x.cfg.Containerd.ExportOnImage(ctx, checkpoint.Snapshot(c.Ref.UID, ""), w)
	})
	if c.Memory != nil {
		add(portable.AgentType, "", contentOf(x.cfg.Checkpoints.AgentFile(c.Ref.UID)))
	}
	for _, rel := range c.Plan.DataPaths() {
		add(portable.VolumeType, rel, func(ctx context.Context, w io.Writer) error {
			return filetree.WriteTree(ctx, w, filepath.Join(x.cfg.Checkpoints.Dir(c.Ref.UID), "volumes", rel))
		})
	}
	if c.Memory == nil || err != nil {
		return layers, err
	}
	dir := x.cfg.Checkpoints.MemoryDir(c.Ref.UID)
	img, err := memimage.Read(dir)
	if err != nil {
		return nil, err
	}
	if err := x.cfg.Checkpoints.Verify(ctx, c.Ref.UID); err != nil {
		return nil, err
	}
	for _, f := range append(slices.Clone(img.Files), memimage.File{Name: imageFile}) {
		add(portable.MemoryType, f.Name, contentOf(filepath.Join(dir, f.Name)))
	}
	return layers, err
}

type countingWriter struct {
	done, total int64
	progress    func(done, total int64)
}

func (t *countingWriter) Write(b []byte) (int, error) {
	t.done += int64(len(b))
	t.progress(t.done, t.total)
	return len(b), nil
}

func contentOf(path string) portable.Content {
	return func(ctx context.Context, w io.Writer) error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		_, err = io.Copy(w, portable.WithContext(ctx, f))
		return err
	}
}
