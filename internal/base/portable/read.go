package portable

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"path"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Reader reads a tar in this package's order sequentially.
type Reader struct {
	*Head
	tar  *tar.Reader
	left []ocispec.Descriptor
	open *Blob
}

// Read reads an artifact's metadata. A tar of another order, or other data, is an errs.ErrInvalid.
func Read(r io.Reader) (*Reader, error) {
	in := &Reader{tar: tar.NewReader(r)}
	if _, err := in.whole(ocispec.ImageLayoutFile); err != nil {
		return nil, err
	}
	b, err := in.whole(ocispec.ImageIndexFile)
	if err != nil {
		return nil, err
	}
	top, err := topOf(b)
	if err != nil {
		return nil, err
	}
	in.Head, err = readHead(top, func(d ocispec.Descriptor) ([]byte, error) {
		b, err := in.whole(blobName(d.Digest))
		if err == nil && (int64(len(b)) != d.Size || digest.FromBytes(b) != d.Digest) {
			err = damaged(d)
		}
		return b, err
	})
	if err != nil {
		return nil, err
	}
	in.left = in.blobs()
	return in, nil
}

// topOf finds the one artifact of a layout.
func topOf(index []byte) (ocispec.Descriptor, error) {
	var all ocispec.Index
	if err := decode(ocispec.ImageIndexFile, index, &all); err != nil {
		return ocispec.Descriptor{}, err
	}
	if len(all.Manifests) != 1 {
		return ocispec.Descriptor{}, invalid("the layout has %d things in its %s, want one, a checkpoint", len(all.Manifests), ocispec.ImageIndexFile)
	}
	return all.Manifests[0], nil
}

func damaged(d ocispec.Descriptor) error {
	what := d.MediaType
	if t := Title(d); t != "" {
		what += " (" + t + ")"
	}
	return fmt.Errorf("%s is damaged: its content is not that of digest %s: %w", what, d.Digest, errs.ErrInvalid)
}

// cut gives errors of reading a tar their kind.
func cut(err error) error {
	switch {
	case err == nil, errs.Kind(err) != nil:
		return err
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return invalid("the tar ends too early")
	case errors.Is(err, tar.ErrHeader):
		return invalid("it is no tar, or damaged: %v", err)
	default:
		return err
	}
}

// next advances to an entry, which must follow.
func (r *Reader) next(name string) (*tar.Header, error) {
	h, err := r.tar.Next()
	if err != nil {
		return nil, cut(err)
	}
	if path.Clean(h.Name) != name || h.Typeflag != tar.TypeReg {
		return nil, invalid("the tar has %q where %q must be; one that barchan did not write is read from a file only", h.Name, name)
	}
	return h, nil
}

func (r *Reader) whole(name string) ([]byte, error) {
	h, err := r.next(name)
	if err != nil {
		return nil, err
	}
	if h.Size > maxJSON {
		return nil, invalid("%s has %d bytes, want at most %d", name, h.Size, maxJSON)
	}
	b, err := io.ReadAll(r.tar)
	return b, cut(err)
}

// Next advances to the next blob; the previous one must be closed. After the last, and the end of the
// tar, it returns io.EOF.
func (r *Reader) Next() (*Blob, error) {
	if r.open != nil && !r.open.closed {
		return nil, errors.New("checkpoint artifact: a blob is open")
	}
	if len(r.left) == 0 {
		if _, err := r.tar.Next(); !errors.Is(err, io.EOF) {
			return nil, errors.Join(invalid("the tar has undeclared content"), err)
		}
		return nil, io.EOF
	}
	d := r.left[0]
	h, err := r.next(blobName(d.Digest))
	if err != nil {
		return nil, err
	}
	if h.Size != d.Size {
		return nil, damaged(d)
	}
	r.left = r.left[1:]
	r.open = NewBlob(d, io.NopCloser(r.tar))
	return r.open, nil
}

// Skip reads the base image, if there is one, only to verify it.
func (r *Reader) Skip(ctx context.Context, blobs int) error {
	for range blobs {
		b, err := r.Next()
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.Discard, WithContext(ctx, b)); err != nil {
			return err
		}
		if err := b.Close(); err != nil {
			return err
		}
	}
	return nil
}

// Blob is a blob that is being read. It ends with io.EOF only if all of it was verified, and with an
// errs.ErrInvalid otherwise.
type Blob struct {
	ocispec.Descriptor
	in     io.ReadCloser
	hash   hash.Hash
	left   int64
	err    error
	closed bool
}

// NewBlob returns a blob that verifies what it reads from in, and closes it at the end.
func NewBlob(d ocispec.Descriptor, in io.ReadCloser) *Blob {
	return &Blob{Descriptor: d, in: in, hash: digest.SHA256.Hash(), left: d.Size}
}

// Read implements io.Reader.
func (b *Blob) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	if b.left == 0 {
		b.err = b.verdict()
		return 0, b.err
	}
	n, err := b.in.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	_, _ = b.hash.Write(p[:n])
	if err != nil && (b.left != 0 || !errors.Is(err, io.EOF)) {
		b.err = cut(err)
		return n, b.err
	}
	return n, nil
}

func (b *Blob) verdict() error {
	if digest.NewDigest(digest.SHA256, b.hash) != b.Digest {
		return damaged(b.Descriptor)
	}
	return io.EOF
}

// Close reads the rest and verifies the whole blob: after a partial read, as by a tar reader, only
// Close returns the result.
func (b *Blob) Close() error {
	if b.closed {
		return nil
	}
	b.closed = true
	_, err := io.Copy(io.Discard, b)
	return errors.Join(err, b.in.Close())
}

// WithContext is a reader that ends with a context.
func WithContext(ctx context.Context, r io.Reader) io.Reader { return &bound{ctx.Err, r} }

type bound struct {
	over func() error
	r    io.Reader
}

func (b *bound) Read(p []byte) (int, error) {
	if err := b.over(); err != nil {
		return 0, err
	}
	return b.r.Read(p)
}

// source returns the blobs of an artifact in any order.
type source interface {
	open(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error)
}

// layoutOf returns an existing artifact as a layout in this package's order.
func layoutOf(ctx context.Context, top ocispec.Descriptor, from source) (*Layout, error) {
	head, err := readHead(top, func(d ocispec.Descriptor) ([]byte, error) {
		var b bytes.Buffer
		err := pass(ctx, from, d, &b)
		return b.Bytes(), err
	})
	if err != nil {
		return nil, err
	}
	return newLayout(head, from), nil
}

// newLayout returns a layout whose blobs come from a source.
func newLayout(h *Head, from source) *Layout {
	l := &Layout{Head: h, contents: map[digest.Digest]Content{}}
	for _, d := range h.blobs() {
		l.contents[d.Digest] = func(ctx context.Context, w io.Writer) error { return pass(ctx, from, d, w) }
	}
	return l
}

// pass copies a blob to w and verifies it.
func pass(ctx context.Context, from source, d ocispec.Descriptor, w io.Writer) error {
	in, err := from.open(ctx, d)
	if err != nil {
		return err
	}
	b := NewBlob(d, in)
	_, err = io.Copy(w, WithContext(ctx, b))
	return errors.Join(err, b.Close())
}

// tarFile is a layout in a tar with random access.
type tarFile struct {
	r     io.ReaderAt
	blobs map[string]span
}

type span struct{ at, size int64 }

// OpenFile reads the entries of a tar, in any order, and the artifact's metadata. The file must stay
// open while the layout is written.
func OpenFile(ctx context.Context, r io.ReaderAt, size int64) (*Layout, error) {
	f := &tarFile{r: r, blobs: map[string]span{}}
	section := io.NewSectionReader(r, 0, size)
	t := tar.NewReader(section)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, cut(err)
		}
		at, err := section.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, fmt.Errorf("read tar: %w", err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if f.blobs[path.Clean(h.Name)] = (span{at, h.Size}); at+h.Size > size {
			return nil, cut(io.ErrUnexpectedEOF)
		}
		if len(f.blobs) > 4*maxBlobs {
			return nil, invalid("the tar has more than %d files", 4*maxBlobs)
		}
	}
	index, ok := f.blobs[ocispec.ImageIndexFile]
	if !ok || index.size > maxJSON {
		return nil, invalid("the tar is no OCI layout: it has no %s of at most %d bytes", ocispec.ImageIndexFile, maxJSON)
	}
	b, err := io.ReadAll(io.NewSectionReader(r, index.at, index.size))
	if err != nil {
		return nil, cut(err)
	}
	top, err := topOf(b)
	if err != nil {
		return nil, err
	}
	return layoutOf(ctx, top, f)
}

func (f *tarFile) open(_ context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	s, ok := f.blobs[blobName(d.Digest)]
	if !ok {
		return nil, fmt.Errorf("checkpoint artifact: blob %s is not in the tar: %w", d.Digest, errs.ErrInvalid)
	}
	return io.NopCloser(io.NewSectionReader(f.r, s.at, s.size)), nil
}

// CopyImage writes the base image as a layout of its own, from the next blobs. If one fails
// verification, the layout is left incomplete and the error has the reason.
func (r *Reader) CopyImage(ctx context.Context, w io.Writer) error {
	t := tar.NewWriter(w)
	top := *r.Image
	top.Descriptor.Annotations = nil
	files, err := layoutFiles(top.Descriptor)
	if err != nil {
		return err
	}
	files = append(files, file{blobName(top.Descriptor.Digest), top.Manifest})
	for _, f := range files {
		if err := writeFile(t, f); err != nil {
			return err
		}
	}
	for range top.Blobs {
		b, err := r.Next()
		if err != nil {
			return err
		}
		if err := t.WriteHeader(header(blobName(b.Digest), b.Size)); err != nil {
			return err
		}
		if _, err := io.Copy(t, WithContext(ctx, b)); err != nil {
			return err
		}
		if err := b.Close(); err != nil {
			return err
		}
	}
	return t.Close()
}
