package filetree

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/pkg/archive"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// A tar takes memory, inodes and disk of the server beyond its own bytes. One beyond these limits is refused.
const (
	// maxEntries bounds what a tar creates.
	maxEntries = 1 << 20
	// maxNamed bounds the paths of a tar, and what is kept of its directories, in bytes.
	maxNamed = 2 * maxHeld
	// folderCost is counted for each directory beside its path and attributes.
	folderCost = 512
	// maxAttributes bounds the attributes of an entry, in bytes: the kernel's limit of one.
	maxAttributes = 64 << 10
)

// ReadTree extracts a tar of [WriteTree] into an empty directory, and never writes outside it. A tar that cannot be read, or
// that has what WriteTree does not write, is an errs.ErrInvalid: sparse files, an entry twice, one whose directory is missing
// or a link, and what is beyond the limits of trees.
func ReadTree(ctx context.Context, dir string, r io.Reader) error {
	return apply(ctx, dir, r, func(*tar.Header, string) (bool, error) { return true, nil })
}

// ApplyLayer extracts a layer of an OCI image of [WriteLayer] into an upper directory of an overlay, as ReadTree does. It
// ignores attributes that only the kernel may set.
func ApplyLayer(ctx context.Context, dir string, r io.Reader) error {
	return apply(ctx, dir, r, archive.OverlayConvertWhiteout)
}

func apply(ctx context.Context, dir string, r io.Reader, whiteout archive.ConvertWhiteout) error {
	x := extraction{dir: filepath.Clean(dir), whiteout: whiteout}
	_, err := archive.Apply(ctx, dir, r, archive.WithFilter(x.check), archive.WithConvertWhiteout(x.place))
	if x.refused != nil {
		return x.refused // without the library's text
	}
	if err == nil || context.Cause(ctx) != nil || errs.Kind(err) != nil {
		return err
	}
	for _, of := range tarsFault {
		if errors.Is(err, of) {
			return fmt.Errorf("%w: %w", err, errs.ErrInvalid)
		}
	}
	if _, system := errors.AsType[*os.PathError](err); system {
		return err
	}
	return Malformed(err)
}

// tarsFault are the errors of system calls that no healthy machine returns for a valid tar.
var tarsFault = []error{
	unix.ENAMETOOLONG, unix.ENOENT, unix.ENOTDIR, unix.EISDIR, unix.ELOOP, unix.EEXIST, unix.EPERM, unix.EINVAL, unix.E2BIG, unix.ERANGE, unix.EMLINK,
}

// extraction checks the entries of a tar before containerd's package extracts them.
type extraction struct {
	dir            string
	whiteout       archive.ConvertWhiteout
	entries, named int
	refused        error
}

func (x *extraction) refuse(rel, why string, args ...any) (bool, error) {
	x.refused = refuse(rel, why, args...)
	return false, x.refused
}

// check refuses an entry for its header, which has a clean name.
func (x *extraction) check(h *tar.Header) (bool, error) {
	attributes, sparse := takeAttributes(h)
	x.entries++
	x.named += len(h.Name) + nameCost
	if h.Typeflag == tar.TypeDir {
		x.named += folderCost + attributes
	}
	switch {
	case x.entries > maxEntries:
		return x.refuse(h.Name, "is one of more than %d entries", maxEntries)
	case len(h.Name) > maxPath || len(h.Linkname) > maxPath:
		return x.refuse(h.Name, "has a path of more than %d bytes", maxPath)
	case strings.Count(h.Name, "/") > maxDepth:
		return x.refuse(h.Name, "has more than %d directories above it", maxDepth)
	case x.named > maxNamed:
		return x.refuse(h.Name, "is one of too many entries: their paths and directories have more than %d MiB", maxNamed>>20)
	case attributes > maxAttributes:
		return x.refuse(h.Name, "has extended attributes of more than %d bytes", maxAttributes)
	case sparse || h.Typeflag == tar.TypeGNUSparse:
		return x.refuse(h.Name, "is a sparse file, which expands to %d bytes; barchan writes none", h.Size)
	case !filepath.IsLocal(h.Name):
		return x.refuse(h.Name, "leads out of the tree")
	}
	// Otherwise each entry would create a path of directories.
	if st, err := os.Lstat(filepath.Dir(filepath.Join(x.dir, h.Name))); err != nil || !st.IsDir() {
		return x.refuse(h.Name, "has no directory above it")
	}
	return true, nil
}

// place is called with the path that an entry is extracted to, which follows links, and converts whiteouts.
func (x *extraction) place(h *tar.Header, path string) (write bool, err error) {
	if path != filepath.Join(x.dir, h.Name) {
		return x.refuse(h.Name, "has a link above it")
	}
	write, err = x.whiteout(h, path)
	if err != nil || !write {
		return write, err
	}
	st, err := os.Lstat(path)
	if err == nil && (!st.IsDir() || h.Typeflag != tar.TypeDir) {
		return x.refuse(h.Name, "is there twice")
	}
	return true, nil
}

// takeAttributes returns the size of an entry's attributes, and whether the tar has only parts of its content. It drops
// attributes that only an overlay may set: they would redirect the kernel to files outside the tar.
func takeAttributes(h *tar.Header) (size int, sparse bool) {
	for name, value := range h.PAXRecords {
		attr, ok := strings.CutPrefix(name, attrRecord)
		switch {
		case strings.HasPrefix(name, "GNU.sparse."):
			sparse = true
		case ok && (strings.HasPrefix(attr, "trusted.") || strings.HasPrefix(attr, "user.overlay.")):
			delete(h.PAXRecords, name)
			continue
		}
		size += len(name) + len(value)
	}
	return size, sparse
}
