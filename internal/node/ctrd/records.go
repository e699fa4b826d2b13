package ctrd

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// LabelImage sets labels of an image's record, and keeps the others. An image that has another digest now is an
// errs.ErrNotFound.
func (c *Client) LabelImage(ctx context.Context, img Image, labels map[string]string) error {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	action := fmt.Sprintf("label image %q", img.Ref)
	now, err := c.api.ImageService().Get(ctx, img.Ref)
	if err != nil {
		return kind(action, err)
	}
	if now.Target.Digest.String() != img.Digest {
		return fmt.Errorf("%s: it is %s now: %w", action, now.Target.Digest, errs.ErrNotFound)
	}
	fields := make([]string, 0, len(labels))
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		fields = append(fields, "labels."+name)
	}
	_, err = c.api.ImageService().Update(ctx, images.Image{Name: img.Ref, Target: now.Target, Labels: labels}, fields...)
	return kind(action, err)
}

// Parts are the blobs and unpacked layers of an image, by their keys, in bytes. Images share parts.
type Parts map[string]int64

// Sum returns the bytes of all parts.
func (p Parts) Sum() (sum int64) {
	for _, n := range p {
		sum += n
	}
	return sum
}

// PartsOf returns what an image, by its whole name and its digest, takes on the disk. Content that is missing is left out.
func (c *Client) PartsOf(ctx context.Context, ref, target string) (Parts, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	if p, ok := c.images.parts(target); ok {
		return p, nil
	}
	action := "measure image " + target
	store := c.api.ContentStore()
	d := digest.Digest(target)
	info, err := store.Info(ctx, d)
	if err != nil {
		return nil, kind(action, err)
	}
	all := Parts{target: info.Size}
	meta, err := c.api.ImageService().Get(ctx, ref) // by its digest, all images would be read
	if err == nil && meta.Target.Digest != d {
		err = errdefs.ErrNotFound
	}
	if err != nil {
		return nil, kind(action, err)
	}
	one, err := c.content(ctx, meta.Target)
	if err != nil {
		return nil, kind(action, err)
	}
	all[one.Manifest.Digest.String()] = one.Manifest.Size
	m, err := images.Manifest(ctx, store, one.Manifest, platforms.All)
	if err != nil {
		return nil, kind(action, err)
	}
	for _, l := range append(m.Layers, m.Config) {
		all[l.Digest.String()] = l.Size
	}
	diffs, err := images.RootFS(ctx, store, m.Config)
	if err != nil {
		return nil, kind(action, err)
	}
	unpacked := true
	for i := range diffs {
		chain := identity.ChainID(diffs[:i+1]).String()
		usage, err := c.api.SnapshotService(snapshotter).Usage(ctx, chain)
		if errdefs.IsNotFound(err) {
			unpacked = false
			continue
		} else if err != nil {
			return nil, kind(action, err)
		}
		all["layer "+chain] = usage.Size
	}
	if unpacked {
		c.images.measured(target, all)
	}
	return all, nil
}
