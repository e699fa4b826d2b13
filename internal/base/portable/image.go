package portable

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

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

// PushTar sends the image in a tar with an OCI layout to a registry: what it lacks, the tag last. It keeps the layout in a temporary
// directory meanwhile. It returns the image's name by its digest. progress receives bytes; nil: none.
func PushTar(ctx context.Context, in io.Reader, to Place, progress func(done, total int64)) (pushed string, err error) {
	dir, err := os.MkdirTemp("", "barchan-image-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := unpackLayout(in, dir); err != nil {
		return "", fmt.Errorf("read image: %w", err)
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return "", fmt.Errorf("read image: %w", err)
	}
	list, err := index.IndexManifest()
	if err != nil || len(list.Manifests) != 1 {
		return "", fmt.Errorf("read image: want a layout of one image: %w", errors.Join(err, errs.ErrInvalid))
	}
	image, err := index.Image(list.Manifests[0].Digest)
	if err != nil {
		return "", fmt.Errorf("read image: %w", err)
	}
	updates := make(chan v1.Update, 16)
	var reports errgroup.Group
	reports.Go(func() error { // ends with the push, which closes the channel
		for u := range updates {
			if progress != nil {
				progress(u.Complete, u.Total)
			}
		}
		return nil
	})
	err = remote.Write(to.ref, image, to.options(ctx, remote.WithProgress(updates))...)
	_ = reports.Wait()
	if err != nil {
		return "", to.refusal("push", err)
	}
	return to.ref.Context().Digest(list.Manifests[0].Digest.String()).Name(), nil
}

// layoutPath matches the files of an OCI layout.
var layoutPath = regexp.MustCompile(`^(oci-layout|index\.json|blobs/sha256/[0-9a-f]{64})$`)

// unpackLayout writes the files of a layout in a tar to a directory, and ignores all others.
func unpackLayout(in io.Reader, dir string) error {
	if err := os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o700); err != nil {
		return err
	}
	for t := tar.NewReader(in); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, in) // to an error after the tar
			return err
		} else if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg || !layoutPath.MatchString(h.Name) {
			continue
		}
		f, err := os.OpenFile(filepath.Join(dir, filepath.FromSlash(h.Name)), os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, t)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
}
