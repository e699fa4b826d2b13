package ctrd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/ctrd/pull"
)

// transferTimeout bounds importing and unpacking one image.
const transferTimeout = pull.Timeout

// Image is a local, unpacked image.
type Image struct {
	// Ref is its name in containerd.
	Ref string
	// Digest is the digest of its manifest or index.
	Digest string
	// Config is its configuration of programs.
	Config ocispec.ImageConfig
	// Labels are those of its record.
	Labels map[string]string
	// chain names the snapshot of all its layers.
	chain string
}

// ImageInfo is one line of a list of images.
type ImageInfo struct {
	Ref     string    `json:"ref"`
	Digest  string    `json:"digest"`
	Size    int64     `json:"size"` // bytes of its content, compressed
	Created time.Time `json:"created"`
	// Labels are those of its record.
	Labels map[string]string `json:"-"`
}

// imageCache caches immutable images by digest.
type imageCache struct {
	mu       sync.Mutex
	byDigest map[digest.Digest]Image // +checklocks:mu
	sizes    map[string]Parts        // by digest, of unpacked images; +checklocks:mu
	packed   map[string]int64        // compressed bytes by digest; +checklocks:mu
}

func (c *imageCache) size(target string) (int64, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.packed[target]
	return n, ok
}

func (c *imageCache) sized(target string, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.packed == nil {
		c.packed = map[string]int64{}
	}
	c.packed[target] = n
}

func (c *imageCache) parts(target string) (Parts, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p, ok := c.sizes[target]
	return p, ok
}

func (c *imageCache) measured(target string, p Parts) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sizes == nil {
		c.sizes = map[string]Parts{}
	}
	c.sizes[target] = p
}

func (c *imageCache) get(d digest.Digest) (Image, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	img, ok := c.byDigest[d]
	return img, ok
}

func (c *imageCache) put(d digest.Digest, img Image) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byDigest == nil {
		c.byDigest = map[digest.Digest]Image{}
	}
	c.byDigest[d] = img
}

// drop forgets an image whose content may go, and which others are unpacked: one of the same layers may have relied on its
// snapshots. What was measured of others stays: thousands would have to be measured after each removal.
func (c *imageCache) drop(target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.byDigest = nil
	delete(c.sizes, target)
	delete(c.packed, target)
}

// Normalize completes a reference by a registry and a tag. The error is an errs.ErrInvalid.
func Normalize(ref string) (string, error) {
	named, err := reference.ParseNormalizedNamed(ref)
	if err != nil {
		return "", fmt.Errorf("image reference %q: %w: %w", ref, err, errs.ErrInvalid)
	}
	return reference.TagNameOnly(named).String(), nil
}

// Resolve finds a local image, and unpacks it if necessary. A missing one is an errs.ErrNotFound.
func (c *Client) Resolve(ctx context.Context, ref string) (Image, error) {
	full, err := Normalize(ref)
	if err != nil {
		return Image{}, err
	}
	callCtx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	meta, err := c.api.ImageService().Get(callCtx, full)
	if err != nil {
		return Image{}, kind(fmt.Sprintf("find image %q", full), err)
	}
	if img, ok := c.images.get(meta.Target.Digest); ok {
		img.Ref, img.Labels = full, meta.Labels
		return img, nil
	}
	return c.inspect(ctx, containerd.NewImage(c.api, meta))
}

// inspect reads an image, and unpacks it if necessary.
func (c *Client) inspect(ctx context.Context, found containerd.Image) (Image, error) {
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	action := fmt.Sprintf("read image %q", found.Name())
	spec, err := found.Spec(ctx)
	if err != nil {
		return Image{}, kind(action, err)
	}
	unpacked, err := found.IsUnpacked(ctx, snapshotter)
	if err != nil {
		return Image{}, kind(action, err)
	}
	if !unpacked {
		err := c.whileSpace(ctx, func(ctx context.Context) error { return found.Unpack(ctx, snapshotter) })
		if err != nil {
			return Image{}, kind(fmt.Sprintf("unpack image %q", found.Name()), err)
		}
	}
	img := Image{
		Ref: found.Name(), Digest: found.Target().Digest.String(), Config: spec.Config, Labels: found.Labels(),
		chain: identity.ChainID(spec.RootFS.DiffIDs).String(),
	}
	c.images.put(found.Target().Digest, img)
	return img, nil
}

// Import reads an image from a tar (OCI layout or docker save) and unpacks it. ref, unless empty,
// is a further name, and comes first in the result. total is the tar's size, zero if unknown.
func (c *Client) Import(ctx context.Context, source io.Reader, total int64, ref string, progress func(Progress)) ([]Image, error) {
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	counted := &countingReader{r: source, step: Progress{Ref: ref, Step: "read", Total: total}, report: progress}
	opts := []containerd.ImportOpt{}
	full := ""
	if ref != "" {
		var err error
		if full, err = Normalize(ref); err != nil {
			return nil, err
		}
		opts = append(opts,
			containerd.WithImageRefTranslator(func(string) string { return full }),
			containerd.WithDigestRef(func(digest.Digest) string { return full }))
	}
	var metas []images.Image
	err := c.whileSpace(ctx, func(ctx context.Context) (err error) {
		metas, err = c.api.Import(ctx, counted, opts...)
		return err
	})
	if err != nil {
		return nil, kind("import image", notImage(err))
	}
	slices.SortStableFunc(metas, func(a, b images.Image) int { return boolOrder(a.Name != full, b.Name != full) })
	var result []Image
	for _, meta := range metas {
		if slices.ContainsFunc(result, func(i Image) bool { return i.Ref == meta.Name }) {
			continue
		}
		Progress{Ref: meta.Name, Step: "unpack"}.report(progress)
		img, err := c.inspect(ctx, containerd.NewImage(c.api, meta))
		if err != nil { // an image that cannot be unpacked has no name
			return nil, errors.Join(err, c.RemoveImageOf(context.WithoutCancel(ctx), meta.Name, meta.Target.Digest))
		}
		result = append(result, img)
		Progress{Ref: meta.Name, Step: "done", Done: total, Total: total}.report(progress)
	}
	if len(result) == 0 {
		return nil, fmt.Errorf("import image: no named image for this platform in the tar; set a name: %w", errs.ErrInvalid)
	}
	return result, nil
}

// boolOrder puts false before true.
func boolOrder(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	default:
		return -1
	}
}

// notImage marks the errors of an invalid tar.
func notImage(err error) error {
	if errors.Is(err, images.ErrSkipDesc) {
		return fmt.Errorf("%w: %w", err, errs.ErrInvalid)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("not a tar, or the end of it is missing: %w: %w", err, errs.ErrInvalid)
	}
	return filetree.Malformed(err)
}

// PullRequest is one pull of an image.
type PullRequest struct {
	Ref         string
	Credentials pull.Credentials
	// Labels are those of the image's record.
	Labels map[string]string
	// Progress receives the steps; nil: none.
	Progress func(Progress)
	// Room and Space bound the pull, as those of pull.Request.
	Room  func(ctx context.Context, bytes int64) error
	Space func() error
}

// Pull fetches an image from its registry and unpacks it. It connects to registries on loopback
// addresses without TLS. A missing image is an errs.ErrNotFound, a denial an errs.ErrForbidden, one that is
// too large an errs.ErrTooLarge.
func (c *Client) Pull(ctx context.Context, req PullRequest) (Image, error) {
	full, err := Normalize(req.Ref)
	if err != nil {
		return Image{}, err
	}
	Progress{Ref: full, Step: "resolve"}.report(req.Progress)
	var got, total int64
	img, err := c.puller.Pull(ctx, c.api, pull.Request{
		Ref: full, Credentials: req.Credentials, Labels: req.Labels, Room: req.Room, Space: req.Space,
		Progress: func(done, of int64) {
			got, total = done, of
			Progress{Ref: full, Step: "download", Done: done, Total: of}.report(req.Progress)
		},
	})
	if err != nil {
		return Image{}, kind(fmt.Sprintf("pull image %q", full), err)
	}
	Progress{Ref: full, Step: "unpack"}.report(req.Progress)
	result, err := c.inspect(ctx, img)
	if err == nil {
		Progress{Ref: full, Step: "done", Done: max(got, total), Total: total}.report(req.Progress)
	}
	return result, err
}

// CheckPull returns nil if the registry has a local image, by its digest, for the credentials. A denial is an errs.ErrForbidden.
func (c *Client) CheckPull(ctx context.Context, img Image, creds pull.Credentials) error {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	exact, err := WithDigest(img.Ref, digest.Digest(img.Digest))
	if err != nil {
		return err
	}
	return kind(fmt.Sprintf("check access to image %q", img.Ref), c.puller.Check(ctx, exact, creds))
}

// Images lists the local images by name; with whole names, those alone.
func (c *Client) Images(ctx context.Context, names ...string) ([]ImageInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	filters := make([]string, len(names))
	for i, name := range names {
		filters[i] = fmt.Sprintf("name==%q", name)
	}
	found, err := c.api.ListImages(ctx, filters...)
	if err != nil {
		return nil, kind("list images", err)
	}
	result := make([]ImageInfo, 0, len(found))
	for _, img := range found {
		info := ImageInfo{Ref: img.Name(), Digest: img.Target().Digest.String(), Created: img.Metadata().CreatedAt, Labels: img.Labels()}
		if info.Size, err = c.sizeOf(ctx, img); err != nil {
			return nil, err
		}
		result = append(result, info)
	}
	slices.SortFunc(result, func(a, b ImageInfo) int { return cmp.Compare(a.Ref, b.Ref) })
	return result, nil
}

// sizeOf returns the compressed bytes of an image. They are read once: a list of thousands would read the content of all.
func (c *Client) sizeOf(ctx context.Context, img containerd.Image) (int64, error) {
	target := img.Target().Digest.String()
	if n, ok := c.images.size(target); ok {
		return n, nil
	}
	n, err := img.Size(ctx)
	if err != nil {
		return 0, kind(fmt.Sprintf("measure image %q", img.Name()), err)
	}
	c.images.sized(target, n)
	return n, nil
}

// RemoveImage removes an image's name, and what nothing else needs of it; sandboxes keep their snapshots. A missing one is an
// errs.ErrNotFound.
func (c *Client) RemoveImage(ctx context.Context, ref string) error {
	return c.removeImage(ctx, ref, images.SynchronousDelete())
}

// UntagImage is RemoveImage, but leaves the content to the next Collect, which looks at the content of all images.
func (c *Client) UntagImage(ctx context.Context, ref string) error { return c.removeImage(ctx, ref) }

func (c *Client) removeImage(ctx context.Context, ref string, opts ...images.DeleteOpt) error {
	full, err := Normalize(ref)
	if err != nil {
		return err
	}
	ctx, cancel := c.removal(ctx)
	defer cancel()
	meta, err := c.api.ImageService().Get(ctx, full)
	if err == nil {
		c.images.drop(meta.Target.Digest.String())
		err = c.api.ImageService().Delete(ctx, full, opts...)
	}
	return kind(fmt.Sprintf("remove image %q", full), err)
}

// Collect removes the content that nothing needs. containerd does the same by itself, some time after a start or many changes.
func (c *Client) Collect(ctx context.Context) error {
	ctx, cancel := c.removal(ctx)
	defer cancel()
	l, err := c.api.LeasesService().Create(ctx, leases.WithRandomID(), leases.WithExpiration(partTime))
	if err == nil {
		err = c.api.LeasesService().Delete(ctx, l, leases.SynchronousDelete)
	}
	return kind("remove unused content", err)
}

// countingReader reports the bytes read: at first, and every mebibyte.
type countingReader struct {
	r        io.Reader
	step     Progress
	reported int64
	report   func(Progress)
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.step.Done += int64(n)
	if c.reported == 0 || c.step.Done-c.reported >= 1<<20 || errors.Is(err, io.EOF) {
		c.reported = c.step.Done
		c.step.report(c.report)
	}
	return n, err
}
