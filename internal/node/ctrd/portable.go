package ctrd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Content is the content of an image for this host's platform.
type Content struct {
	// Manifest is the one of this platform, also if the image's name refers to an index.
	Manifest ocispec.Descriptor
	Raw      []byte
	// Chain identifies the content of all layers.
	Chain digest.Digest
}

// maxManifest bounds the metadata of an image that is read into memory, in bytes.
const maxManifest = 8 << 20

// Chain identifies the content of all the image's layers, independent of names and compression.
func (i Image) Chain() digest.Digest { return digest.Digest(i.chain) }

// ImageContent finds the manifest of an image by its Image.Digest. Missing content is an
// errs.ErrNotFound.
func (c *Client) ImageContent(ctx context.Context, target string) (Content, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	action := fmt.Sprintf("read image %s", target)
	found, err := c.api.ImageService().List(ctx)
	if err != nil {
		return Content{}, kind(action, err)
	}
	for _, meta := range found {
		if meta.Target.Digest.String() != target {
			continue
		}
		one, err := c.content(ctx, meta.Target)
		return one, kind(action, err)
	}
	return Content{}, fmt.Errorf("%s: no local image has this digest: %w", action, errs.ErrNotFound)
}

func (c *Client) content(ctx context.Context, target ocispec.Descriptor) (one Content, err error) {
	store := c.api.ContentStore()
	children := images.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if images.IsManifestType(d.MediaType) {
			one.Manifest = d
			return nil, nil // children are not needed
		}
		return images.FilterPlatforms(images.ChildrenHandler(store), platforms.Default())(ctx, d)
	})
	if err := images.Walk(ctx, children, target); err != nil {
		return Content{}, err
	}
	m, err := images.Manifest(ctx, store, target, platforms.Default())
	if err != nil {
		return Content{}, err
	}
	if one.Manifest.Size > maxManifest || m.Config.Size > maxManifest {
		return Content{}, fmt.Errorf("manifest or config has more than %d bytes: %w", maxManifest, errs.ErrInvalid)
	}
	if one.Raw, err = content.ReadBlob(ctx, store, one.Manifest); err != nil {
		return Content{}, err
	}
	diffs, err := images.RootFS(ctx, store, m.Config)
	one.Chain = identity.ChainID(diffs)
	var has ocispec.Manifest
	if err == nil {
		err = json.Unmarshal(one.Raw, &has)
	}
	if err == nil && has.Config.Digest != m.Config.Digest {
		err = fmt.Errorf("several manifests for this platform: %w", errs.ErrInvalid)
	}
	for _, d := range append(has.Layers, has.Config) {
		if err == nil {
			_, err = store.Info(ctx, d.Digest)
		}
	}
	return one, err
}

// WithDigest returns a reference to an image of one digest, in the repository of another reference.
func WithDigest(ref string, d digest.Digest) (string, error) {
	named, err := reference.ParseNormalizedNamed(ref)
	if err == nil {
		named, err = reference.WithDigest(reference.TrimNamed(named), d)
	}
	if err != nil {
		return "", fmt.Errorf("image reference %q: %w: %w", ref, err, errs.ErrInvalid)
	}
	return named.String(), nil
}

// WriteContent writes a blob of an image.
func (c *Client) WriteContent(ctx context.Context, d ocispec.Descriptor, w io.Writer) error {
	action := "read blob " + d.Digest.String()
	at, err := c.api.ContentStore().ReaderAt(ctx, d)
	if err != nil {
		return kind(action, err)
	}
	defer func() { _ = at.Close() }()
	_, err = io.Copy(w, io.NewSectionReader(at, 0, at.Size()))
	return kind(action, err)
}

// ImageOf finds a local image by its layers, preferring one with the name. None is an
// errs.ErrNotFound.
func (c *Client) ImageOf(ctx context.Context, chain digest.Digest, ref string) (Image, error) {
	if img, err := c.Resolve(ctx, ref); err == nil && img.Chain() == chain {
		return img, nil
	}
	all, err := c.Images(ctx)
	if err != nil {
		return Image{}, err
	}
	for _, info := range all {
		if img, err := c.Resolve(ctx, info.Ref); err == nil && img.Chain() == chain {
			return img, nil
		}
	}
	return Image{}, fmt.Errorf("no local image has the layers of %s (%s): %w", ref, chain, errs.ErrNotFound)
}

// ImportUnder imports one image from a tar under a name, as Import does. Meanwhile a lease of that
// ID keeps its content; after a crash, EndLease removes the lease. After an error nothing keeps the
// content.
func (c *Client) ImportUnder(ctx context.Context, lease string, source io.Reader, ref string) (Image, error) {
	if err := c.EndLease(ctx, lease); err != nil {
		return Image{}, err
	}
	call, cancel := c.uninterrupted(ctx)
	defer cancel()
	l, err := c.api.LeasesService().Create(call, leases.WithID(lease), leases.WithExpiration(partTime))
	if err != nil {
		return Image{}, kind("make lease", err)
	}
	defer c.release(ctx, l)
	all, err := c.Import(leases.WithLease(ctx, l.ID), source, 0, ref, nil)
	if err != nil {
		return Image{}, err
	}
	return all[0], nil
}

// EndLease removes a lease, and with it the objects that only the lease keeps. None is success.
func (c *Client) EndLease(ctx context.Context, id string) error {
	ctx, cancel := c.removal(context.WithoutCancel(ctx))
	defer cancel()
	err := c.api.LeasesService().Delete(ctx, leases.Lease{ID: id}, leases.SynchronousDelete)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return kind("remove lease "+id, err)
}

// RemoveImageOf removes an image's name if it refers to a digest; otherwise it is success.
func (c *Client) RemoveImageOf(ctx context.Context, ref string, target digest.Digest) error {
	ctx, cancel := c.removal(ctx)
	defer cancel()
	meta, err := c.api.ImageService().Get(ctx, ref)
	if errdefs.IsNotFound(err) || (err == nil && meta.Target.Digest != target) {
		return nil
	}
	if err == nil {
		c.images.drop(target.String())
		err = c.api.ImageService().Delete(ctx, ref, images.SynchronousDelete(), images.DeleteTarget(&meta.Target))
	}
	if errdefs.IsNotFound(err) {
		return nil
	}
	return kind(fmt.Sprintf("remove image %q", ref), err)
}

// ChainOf identifies the content of the image below a committed snapshot, across other committed
// ones.
func (c *Client) ChainOf(ctx context.Context, name string) (digest.Digest, error) {
	_, image, err := c.below(ctx, name)
	return digest.Digest(image), kind("find image below snapshot "+name, err)
}

// below finds the parent of a committed snapshot, and the image below all of ours.
func (c *Client) below(ctx context.Context, name string) (parent, image string, err error) {
	one, err := c.committed(ctx, name)
	if err != nil {
		return "", "", err
	}
	for image = one.Parent; image != ""; {
		info, err := c.stat(ctx, image)
		if err != nil {
			return "", "", err
		}
		if info.Labels[labelCommitted] == "" {
			break
		}
		image = info.Parent
	}
	return one.Parent, image, nil
}

// ExportOnImage is ExportCommitted for the whole difference from the image. A snapshot on other
// committed ones is compared with the image, which reads every file; of its attributes only
// capabilities are kept.
func (c *Client) ExportOnImage(ctx context.Context, name string, w io.Writer) (err error) {
	action := "export snapshot " + name
	parent, image, err := c.below(ctx, name)
	if err != nil {
		return kind(action, err)
	}
	if parent == image {
		return c.ExportCommitted(ctx, name, w)
	}
	l, err := c.lease(ctx)
	if err != nil {
		return kind(action, err)
	}
	defer c.release(ctx, l)
	key := name + "-diff-" + time.Now().UTC().Format("150405.000000000")
	view := func(suffix, of string) ([]mount.Mount, error) {
		call, cancel := c.uninterrupted(leases.WithLease(ctx, l.ID))
		defer cancel()
		return c.api.SnapshotService(snapshotter).View(call, key+suffix, of)
	}
	defer func() {
		err = errors.Join(err, c.RemoveSnapshot(ctx, key+"-image"), c.RemoveSnapshot(ctx, key+"-files"))
	}()
	lower, err := view("-image", image)
	if err != nil {
		return kind(action, err)
	}
	upper, err := view("-files", name)
	if err != nil {
		return kind(action, err)
	}
	return kind(action, whileMounted(lower, func(a string) error {
		return whileMounted(upper, func(b string) error { return archive.WriteDiff(ctx, w, a, b) })
	}))
}

// whileMounted mounts a snapshot privately for this process, at the path that use receives. The
// mount ends with use, or with the process.
func whileMounted(mounts []mount.Mount, use func(path string) error) (err error) {
	root, err := openMounted(mounts)
	if err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	return use(fmt.Sprintf("/proc/self/fd/%d/.", root.Fd())) // the dot resolves the link
}

// openMounted opens the root of a mount that is detached when it returns.
func openMounted(mounts []mount.Mount) (root *os.File, err error) {
	dir, err := os.MkdirTemp("", "barchan-mount-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.Remove(dir)) }()
	defer func() { err = errors.Join(err, mount.UnmountAll(dir, unix.MNT_DETACH)) }()
	if err := mount.All(mount.RemoveVolatileOption(mounts), dir); err != nil {
		return nil, err
	}
	return os.Open(dir)
}
