package volumetree

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Remove removes a file, a link itself, or a directory with all that is in it.
func (t *Tree) Remove(ctx context.Context, name string) error {
	shown, below, err := clean(name)
	if err != nil {
		return err
	}
	if below == "." {
		return refuse(errs.ErrInvalid, "path: the volume itself is removed by its ID")
	}
	dir, err := t.openDir(path.Dir(shown), path.Dir(below))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	if err := removeAt(ctx, int(dir.Fd()), path.Base(below)); err != nil { //nolint:gosec // a descriptor is small
		return classify(shown, err)
	}
	return nil
}

// RemoveAll removes a directory of the host with all that is in it, however deep; one that does not exist is no error.
func RemoveAll(ctx context.Context, dir string) error {
	parent, err := os.Open(path.Dir(dir))
	if err == nil {
		err = removeAt(ctx, int(parent.Fd()), path.Base(dir)) //nolint:gosec // a descriptor is small
		_ = parent.Close()
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}

// removeAt removes a file of a directory. A directory is emptied without descending: what is in its directories moves up into
// it, so that no depth takes memory or descriptors. A process that fills it meanwhile is outlasted until ctx ends.
func removeAt(ctx context.Context, parent int, name string) error {
	err := unix.Unlinkat(parent, name, 0)
	if !errors.Is(err, unix.EISDIR) {
		return err
	}
	top, err := openAt(parent, name)
	if err != nil {
		return err
	}
	defer func() { _ = top.Close() }()
	f := flattening{top: int(top.Fd()), prefix: ".removed-" + rand.Text()} //nolint:gosec // a descriptor is small
	for {
		if err := f.empty(ctx); err != nil {
			return err
		}
		switch err := unix.Unlinkat(parent, name, unix.AT_REMOVEDIR); {
		case err == nil, errors.Is(err, fs.ErrNotExist):
			return nil
		case !errors.Is(err, unix.ENOTEMPTY):
			return err
		}
	}
}

// flattening removes all that is in the directory top.
type flattening struct {
	top    int
	prefix string
	moved  int
}

// empty removes what is in top, until a pass finds no directory.
func (f *flattening) empty(ctx context.Context) error {
	for {
		found := false
		err := each(ctx, f.top, ".", func(_ int, child string) error {
			err := unix.Unlinkat(f.top, child, 0)
			if !errors.Is(err, unix.EISDIR) {
				return ignoreAbsent(err)
			}
			found = true
			if err := f.lift(ctx, child); err != nil {
				return err
			}
			err = unix.Unlinkat(f.top, child, unix.AT_REMOVEDIR)
			if errors.Is(err, unix.ENOTEMPTY) {
				return nil // the next pass
			}
			return ignoreAbsent(err)
		})
		if err != nil || !found {
			return err
		}
	}
}

// lift removes the files of a directory in top, and moves its directories into top.
func (f *flattening) lift(ctx context.Context, child string) error {
	return each(ctx, f.top, child, func(fd int, name string) error {
		err := unix.Unlinkat(fd, name, 0)
		if errors.Is(err, unix.EISDIR) {
			f.moved++
			err = unix.Renameat(fd, name, f.top, fmt.Sprintf("%s-%d", f.prefix, f.moved))
		}
		return ignoreAbsent(err)
	})
}

// each calls do with the names in a directory, and its descriptor.
func each(ctx context.Context, parent int, name string, do func(fd int, name string) error) error {
	dir, err := openAt(parent, name)
	if err != nil {
		return ignoreAbsent(err)
	}
	defer func() { _ = dir.Close() }()
	for {
		if err := ctx.Err(); err != nil {
			return errs.Retryable(err)
		}
		names, err := dir.ReadDir(batch)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return ignoreAbsent(err)
		}
		for _, n := range names {
			if err := do(int(dir.Fd()), n.Name()); err != nil { //nolint:gosec // a descriptor is small
				return err
			}
		}
	}
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
