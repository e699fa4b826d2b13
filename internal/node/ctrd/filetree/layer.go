package filetree

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Markers of removed files in a layer of an image.
const (
	whiteoutPrefix = ".wh."
	opaqueName     = whiteoutPrefix + whiteoutPrefix + ".opq"
)

// Markers of removed files in an upper directory of an overlay, and a tar's prefix of attributes.
const (
	overlayPrefix = "trusted.overlay."
	opaqueAttr    = overlayPrefix + "opaque"
	attrRecord    = "SCHILY.xattr."
)

// layerWriter writes an upper directory as a layer.
type layerWriter struct {
	tar   *tar.Writer
	links links
}

// WriteLayer writes the upper directory of an overlay as an uncompressed layer of an OCI image. It
// skips sockets, which a tar cannot hold, and writes holes as zeros.
func WriteLayer(ctx context.Context, w io.Writer, upper string) error {
	l := layerWriter{tar: tar.NewWriter(w)}
	root, err := openFolder(upper, "")
	if err != nil {
		return err
	}
	defer func() { _ = root.file.Close() }()
	if err := root.each(ctx, func(e entry) error { return l.add(ctx, root, e) }); err != nil {
		return err
	}
	return l.tar.Close()
}

func (l *layerWriter) add(ctx context.Context, in *folder, e entry) error {
	if e.whiteout() {
		return l.mark(path.Join(path.Dir(e.rel), whiteoutPrefix+e.name))
	}
	if strings.HasPrefix(e.name, whiteoutPrefix) {
		return fmt.Errorf("%q has the name of a whiteout; rename it: %w", e.rel, errs.ErrInvalid)
	}
	if e.kind() == unix.S_IFSOCK {
		return nil
	}
	h, opaque, err := l.header(e)
	if err != nil {
		return fmt.Errorf("describe %q: %w", e.rel, err)
	}
	if err := l.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("write %q: %w", e.rel, err)
	}
	if h.Typeflag == tar.TypeReg && h.Size > 0 {
		return l.content(ctx, e)
	} else if e.kind() != unix.S_IFDIR {
		return nil
	}
	if opaque {
		if err := l.mark(path.Join(e.rel, opaqueName)); err != nil {
			return err
		}
	}
	below, err := in.open(e.at, e.rel)
	if err != nil {
		return err
	}
	defer func() { _ = below.file.Close() }()
	return below.each(ctx, func(e entry) error { return l.add(ctx, below, e) })
}

// mark writes an empty file, as whiteouts are.
func (l *layerWriter) mark(name string) error {
	err := l.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Format: tar.FormatPAX, ModTime: time.Unix(0, 0)})
	if err != nil {
		return fmt.Errorf("write %q: %w", name, err)
	}
	return nil
}

func (l *layerWriter) header(e entry) (h *tar.Header, opaque bool, err error) {
	h = &tar.Header{
		Name: e.rel, Mode: int64(e.Mode &^ unix.S_IFMT), Uid: int(e.Uid), Gid: int(e.Gid), Format: tar.FormatPAX,
		ModTime: time.Unix(e.Mtim.Unix()), PAXRecords: map[string]string{},
	}
	switch e.kind() {
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, e.rel+"/"
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(e.at); err != nil {
			return nil, false, err
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		h.Typeflag, h.Devmajor, h.Devminor = tar.TypeChar, int64(unix.Major(e.Rdev)), int64(unix.Minor(e.Rdev))
		if e.kind() == unix.S_IFBLK {
			h.Typeflag = tar.TypeBlock
		}
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	default:
		h.Typeflag, h.Size = tar.TypeReg, e.Size
	}
	if e.Nlink > 1 && e.kind() != unix.S_IFDIR {
		if first, ok := l.links.first[e.Ino]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		} else if err := l.links.add(e); err != nil {
			return nil, false, err
		}
	}
	opaque, err = addAttributes(h, e) // for a hard link too: extracting one sets the owner again, which clears attributes
	return h, opaque, err
}

// addAttributes adds attributes to a header, and reports whether the overlay marks it opaque.
func addAttributes(h *tar.Header, e entry) (opaque bool, err error) {
	found, err := Attributes(e.at)
	if err != nil {
		return false, err
	}
	for name, value := range found {
		switch {
		case name == opaqueAttr:
			opaque = string(value) == "y"
		case name == overlayPrefix+"redirect", name == overlayPrefix+"metacopy":
			return false, fmt.Errorf("it is spread over layers (%s): %w", name, errs.ErrInvalid)
		case !strings.HasPrefix(name, overlayPrefix):
			h.PAXRecords[attrRecord+name] = string(value)
		}
	}
	return opaque, nil
}

func (l *layerWriter) content(ctx context.Context, e entry) error {
	f, err := os.OpenFile(e.at, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("read %q: %w", e.rel, err)
	}
	defer func() { _ = f.Close() }()
	for left := e.Size; left > 0; {
		n, err := io.CopyN(l.tar, f, min(left, copyChunk))
		if err = errors.Join(err, context.Cause(ctx)); err != nil {
			return fmt.Errorf("write %q: %w", e.rel, err)
		}
		left -= n
	}
	return nil
}
