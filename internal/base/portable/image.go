package portable

import (
	"context"
	"fmt"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// ParseImage parses the name of a container image in Docker's short form, and the files that access
// names. The error is an errs.ErrInvalid.
func ParseImage(text string, access Access) (Place, error) {
	ref, err := name.ParseReference(text, access.nameOptions()...)
	if err != nil {
		return Place{}, fmt.Errorf("image reference %q: %w: %w", text, err, errs.ErrInvalid)
	}
	return access.place("", ref)
}

// PullImage reads the manifests of a container image in a registry. Its blobs are fetched as they are
// written; of a multi-platform image those for Linux on this architecture alone.
func PullImage(ctx context.Context, from Place) (*Layout, error) {
	l, err := pullImage(ctx, from)
	if err != nil {
		return nil, from.refusal("pull", err)
	}
	return l, nil
}

func pullImage(ctx context.Context, from Place) (*Layout, error) {
	got, err := remote.Get(from.ref, from.options(ctx, remote.WithPlatform(v1.Platform{OS: "linux", Architecture: runtime.GOARCH}))...)
	if err != nil {
		return nil, err
	}
	top := smallBlob{descriptorOf(got.Descriptor), got.Manifest}
	h := &Head{Config: Config{Name: from.ref.Identifier()}, top: top.Descriptor, small: []smallBlob{top}}
	image := top
	if got.MediaType.IsIndex() {
		if image, err = platformImage(got); err != nil {
			return nil, err
		}
		h.small = append(h.small, image)
	}
	for _, b := range h.small {
		if len(b.content) > maxJSON {
			return nil, fmt.Errorf("its manifest has %d bytes, want at most %d: %w", len(b.content), maxJSON, errs.ErrInvalid)
		}
	}
	if err := h.readImage(image.Descriptor, image.content); err != nil {
		return nil, err
	}
	return newLayout(h, &registry{from, got}), nil
}

// platformImage finds the manifest for the platform of an index.
func platformImage(index *remote.Descriptor) (b smallBlob, err error) {
	image, err := index.Image()
	if err != nil {
		return b, fmt.Errorf("image for linux/%s: %w: %w", runtime.GOARCH, err, errs.ErrNotFound)
	}
	if b.content, err = image.RawManifest(); err != nil {
		return b, err
	}
	mediaType, err := image.MediaType()
	if err != nil {
		return b, err
	}
	b.Descriptor = ocispec.Descriptor{MediaType: string(mediaType), Digest: digest.FromBytes(b.content), Size: int64(len(b.content))}
	return b, nil
}

func descriptorOf(d v1.Descriptor) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: string(d.MediaType), Digest: digest.Digest(d.Digest.String()), Size: d.Size}
}

// PushImages sends an index of images to a registry: what it lacks, the tag last. It returns the name of the index by its digest.
func PushImages(ctx context.Context, index v1.ImageIndex, to Place) (string, error) {
	digest, err := index.Digest()
	if err == nil {
		err = remote.WriteIndex(to.ref, index, to.options(ctx)...)
	}
	if err != nil {
		return "", to.refusal("push", err)
	}
	return to.ref.Context().Digest(digest.String()).Name(), nil
}
