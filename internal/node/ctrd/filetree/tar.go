package filetree

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// WriteTree writes a directory and its content as a tar for [ReadTree]. It skips sockets and
// writes holes as zeros. Names that a layer of an image cannot have are an errs.ErrInvalid.
func WriteTree(ctx context.Context, w io.Writer, dir string) error {
	l := layerWriter{tar: tar.NewWriter(w)}
	root, err := openFolder(dir, "")
	if err != nil {
		return err
	}
	defer func() { _ = root.file.Close() }()
	self := entry{at: root.self(), rel: "."}
	if err := unix.Fstat(int(root.file.Fd()), &self.Stat_t); err != nil {
		return fmt.Errorf("stat %q: %w", dir, err)
	}
	h, _, err := l.header(self)
	if err != nil {
		return err
	}
	if err := l.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("write %q: %w", dir, err)
	}
	if err := root.each(ctx, func(e entry) error { return l.add(ctx, root, e) }); err != nil {
		return err
	}
	return l.tar.Close()
}

// Malformed marks errors of a malformed tar as errs.ErrInvalid and returns others unchanged.
func Malformed(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, gzip.ErrHeader) || errdefs.IsUnknown(err) {
		return fmt.Errorf("%w: %w", err, errs.ErrInvalid)
	}
	return err
}
