package portable

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Content writes a blob's bytes, the same ones each time.
type Content func(ctx context.Context, w io.Writer) error

// Layer is a blob to be written.
type Layer struct {
	ocispec.Descriptor
	Content Content
}

// Measure runs a content through once for its size and digest: both precede it in a tar.
func Measure(ctx context.Context, mediaType, title string, content Content) (Layer, error) {
	hash := digest.SHA256.Digester()
	n := &counter{w: hash.Hash()}
	if err := content(ctx, n); err != nil {
		return Layer{}, err
	}
	l := Layer{Descriptor: ocispec.Descriptor{MediaType: mediaType, Digest: hash.Digest(), Size: n.n}, Content: content}
	if title != "" {
		l.Annotations = map[string]string{ocispec.AnnotationTitle: title}
	}
	return l, nil
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// Layout is an artifact to be written.
type Layout struct {
	*Head
	contents map[digest.Digest]Content
}

// NewLayout returns an artifact; image is nil if the base image is left out.
func NewLayout(config Config, image *BaseImage, imageContent func(ocispec.Descriptor) Content, layers []Layer) (*Layout, error) {
	l := &Layout{contents: map[digest.Digest]Content{}}
	var err error
	descriptors := make([]ocispec.Descriptor, len(layers))
	for i, x := range layers {
		descriptors[i], l.contents[x.Digest] = x.Descriptor, x.Content
	}
	if l.Head, err = newHead(config, image, descriptors); err != nil {
		return nil, err
	}
	if l.Image != nil {
		for _, d := range l.Image.Blobs {
			l.contents[d.Digest] = imageContent(d)
		}
	}
	return l, nil
}

// blobName returns the path of a blob in a layout.
func blobName(d digest.Digest) string {
	return path.Join(ocispec.ImageBlobsDir, d.Algorithm().String(), d.Encoded())
}

// files returns the files of a layout other than blobs.
func (h *Head) files() ([]file, error) { return layoutFiles(h.named()) }

func layoutFiles(top ocispec.Descriptor) ([]file, error) {
	index, err := json.Marshal(ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{top},
	})
	if err != nil {
		return nil, fmt.Errorf("describe layout: %w", err)
	}
	layout, err := json.Marshal(ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion})
	if err != nil {
		return nil, fmt.Errorf("describe layout: %w", err)
	}
	return []file{{ocispec.ImageLayoutFile, layout}, {ocispec.ImageIndexFile, index}}, nil
}

type file struct {
	name    string
	content []byte
}

// named returns the top descriptor with its name, by which other tools find it.
func (h *Head) named() ocispec.Descriptor {
	d := h.top
	d.Annotations = map[string]string{ocispec.AnnotationRefName: h.Config.Name}
	return d
}

const tarBlock = 512

// tarSize returns the size of a file in a tar.
func tarSize(size int64) int64 { return tarBlock + (size+tarBlock-1)/tarBlock*tarBlock }

// Size returns the size of the tar, in bytes.
func (h *Head) Size() int64 {
	sum := int64(2 * tarBlock)
	files, _ := h.files()
	for _, f := range files {
		sum += tarSize(int64(len(f.content)))
	}
	for _, b := range h.small {
		sum += tarSize(b.Size)
	}
	for _, d := range h.blobs() {
		sum += tarSize(d.Size)
		if d.Size >= maxUSTAR {
			sum += 3 * tarBlock // a PAX header has the size
		}
	}
	return sum
}

// maxUSTAR is the size from which a file does not fit a USTAR header.
const maxUSTAR = 8 << 30

// Write writes the tar. A content that differs from its measurement is an error, and the tar is then
// incomplete.
func (l *Layout) Write(ctx context.Context, w io.Writer) error {
	t := tar.NewWriter(w)
	files, err := l.files()
	if err != nil {
		return fmt.Errorf("write tar: %w", err)
	}
	for _, b := range l.small {
		files = append(files, file{blobName(b.Digest), b.content})
	}
	for _, f := range files {
		if err := writeFile(t, f); err != nil {
			return fmt.Errorf("write tar: %w", err)
		}
	}
	for _, d := range l.blobs() {
		if err := l.writeBlob(ctx, t, d); err != nil {
			return fmt.Errorf("write tar: %s %s: %w", d.MediaType, Title(d), err)
		}
	}
	return t.Close()
}

func writeFile(t *tar.Writer, f file) error {
	if err := t.WriteHeader(header(f.name, int64(len(f.content)))); err != nil {
		return err
	}
	_, err := t.Write(f.content)
	return err
}

func header(name string, size int64) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o644, ModTime: time.Unix(0, 0)}
}

func (l *Layout) writeBlob(ctx context.Context, t *tar.Writer, d ocispec.Descriptor) error {
	if err := t.WriteHeader(header(blobName(d.Digest), d.Size)); err != nil {
		return err
	}
	hash := digest.SHA256.Digester()
	out := &counter{w: io.MultiWriter(t, hash.Hash())}
	if err := l.contents[d.Digest](ctx, out); err != nil {
		return err
	}
	if out.n != d.Size || hash.Digest() != d.Digest {
		return errors.New("it is another one than when it was measured")
	}
	return nil
}
