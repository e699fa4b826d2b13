package ctrd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
)

// transferTimeout bounds pulling and unpacking one image.
const transferTimeout = 30 * time.Minute

// Image is a local, unpacked image.
type Image struct {
	// Ref is its name in containerd.
	Ref string
	// Digest is the digest of its manifest or index.
	Digest string
	// Config is its configuration of programs.
	Config ocispec.ImageConfig
	// chain names the snapshot of all its layers.
	chain string
}

// ImageInfo is one line of a list of images.
type ImageInfo struct {
	Ref     string    `json:"ref"`
	Digest  string    `json:"digest"`
	Size    int64     `json:"size"` // bytes of its content, compressed
	Created time.Time `json:"created"`
}

// Credentials returns user and secret for a registry host; both are empty if there are none.
type Credentials func(host string) (user, secret string, err error)

// imageCache caches immutable images by digest.
type imageCache struct {
	mu       sync.Mutex
	byDigest map[digest.Digest]Image // +checklocks:mu
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

func (c *imageCache) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.byDigest = nil
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
		img.Ref = full
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
		if err := found.Unpack(ctx, snapshotter); err != nil {
			return Image{}, kind(fmt.Sprintf("unpack image %q", found.Name()), err)
		}
	}
	img := Image{
		Ref: found.Name(), Digest: found.Target().Digest.String(), Config: spec.Config,
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
	metas, err := c.api.Import(ctx, counted, opts...)
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
		if err != nil {
			return nil, err
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
	return filetree.Malformed(err)
}

// Pull fetches an image from its registry and unpacks it. It connects to registries on loopback
// addresses without TLS. A missing image is an errs.ErrNotFound.
func (c *Client) Pull(ctx context.Context, ref string, creds Credentials, progress func(Progress)) (Image, error) {
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	full, err := Normalize(ref)
	if err != nil {
		return Image{}, err
	}
	Progress{Ref: full, Step: "resolve"}.report(progress)
	tally := &pullProgress{client: c, ref: full, report: progress, seen: map[digest.Digest]int64{}}
	stop := tally.watch(ctx)
	img, err := c.api.Pull(ctx, full,
		containerd.WithPullUnpack, containerd.WithPullSnapshotter(snapshotter),
		containerd.WithResolver(resolver(creds)), containerd.WithImageHandler(images.HandlerFunc(tally.add)))
	stop()
	if err != nil {
		return Image{}, kind(fmt.Sprintf("pull image %q", full), err)
	}
	Progress{Ref: full, Step: "unpack"}.report(progress)
	result, err := c.inspect(ctx, img)
	if err == nil {
		done, total := tally.sums()
		Progress{Ref: full, Step: "done", Done: max(done, total), Total: total}.report(progress)
	}
	return result, err
}

func resolver(creds Credentials) *resolverOf {
	var auth []docker.AuthorizerOpt
	if creds != nil {
		auth = append(auth, docker.WithAuthCreds(creds))
	}
	return &resolverOf{docker.NewResolver(docker.ResolverOptions{
		Hosts: docker.ConfigureDefaultRegistries(
			docker.WithPlainHTTP(func(host string) (bool, error) { return isLoopback(host), nil }),
			docker.WithAuthorizer(docker.NewDockerAuthorizer(auth...))),
	})}
}

// isLoopback reports whether a registry's host, with or without port, is this host.
func isLoopback(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || (err == nil && addr.IsLoopback())
}

// Images lists the local images by name.
func (c *Client) Images(ctx context.Context) ([]ImageInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	found, err := c.api.ListImages(ctx)
	if err != nil {
		return nil, kind("list images", err)
	}
	result := make([]ImageInfo, 0, len(found))
	for _, img := range found {
		info := ImageInfo{Ref: img.Name(), Digest: img.Target().Digest.String(), Created: img.Metadata().CreatedAt}
		if info.Size, err = img.Size(ctx); err != nil {
			return nil, kind(fmt.Sprintf("measure image %q", img.Name()), err)
		}
		result = append(result, info)
	}
	slices.SortFunc(result, func(a, b ImageInfo) int { return cmp.Compare(a.Ref, b.Ref) })
	return result, nil
}

// RemoveImage removes an image's name; sandboxes keep their snapshots. A missing one is an
// errs.ErrNotFound.
func (c *Client) RemoveImage(ctx context.Context, ref string) error {
	full, err := Normalize(ref)
	if err != nil {
		return err
	}
	ctx, cancel := c.removal(ctx)
	defer cancel()
	c.images.drop()
	err = c.api.ImageService().Delete(ctx, full, images.SynchronousDelete())
	return kind(fmt.Sprintf("remove image %q", full), err)
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
