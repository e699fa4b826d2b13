package volumes

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
)

// walkTimeout bounds a list or a removal of many files.
const walkTimeout = time.Minute

// open opens a volume's files. One that is gone since its token was checked is an errs.ErrNotFound.
func (s *Service) open(v volumetree.Ref) (*volumetree.Tree, error) {
	t, err := s.Files.Tree(v)
	if errors.Is(err, errs.ErrNotFound) {
		return nil, errs.Public(err, "the volume has no files; it is being made or removed")
	}
	return t, err
}

// with calls do with a volume's open files.
func with[T any](s *Service, v volumetree.Ref, do func(*volumetree.Tree) (T, error)) (out T, err error) {
	t, err := s.open(v)
	if err != nil {
		return out, err
	}
	defer func() { _ = t.Close() }()
	return do(t)
}

// Stat describes a file.
func (s *Service) Stat(v volumetree.Ref, path string) (volumetree.Entry, error) {
	return with(s, v, func(t *volumetree.Tree) (volumetree.Entry, error) { return t.Stat(path) })
}

// SetAttributes changes a file's owner and mode.
func (s *Service) SetAttributes(v volumetree.Ref, path string, a volumetree.Attributes) (volumetree.Entry, error) {
	return with(s, v, func(t *volumetree.Tree) (volumetree.Entry, error) { return t.SetAttributes(path, a) })
}

// ListDir describes what is in a directory.
func (s *Service) ListDir(ctx context.Context, v volumetree.Ref, path string, depth int) ([]volumetree.Entry, error) {
	ctx, cancel := context.WithTimeout(ctx, walkTimeout)
	defer cancel()
	return with(s, v, func(t *volumetree.Tree) ([]volumetree.Entry, error) { return t.List(ctx, path, depth) })
}

// Remove removes a file, or a directory with all that is in it.
func (s *Service) Remove(ctx context.Context, v volumetree.Ref, path string) error {
	ctx, cancel := context.WithTimeout(ctx, walkTimeout)
	defer cancel()
	_, err := with(s, v, func(t *volumetree.Tree) (struct{}, error) { return struct{}{}, t.Remove(ctx, path) })
	if err == nil {
		err = s.Files.Take(v, 0, 0) // to be measured again
	}
	return err
}

// MakeDir makes a directory.
func (s *Service) MakeDir(v volumetree.Ref, path string, parents bool, a volumetree.Attributes) (volumetree.Entry, error) {
	if err := s.Gate.Err(); err != nil {
		return volumetree.Entry{}, err
	}
	if err := s.Files.Take(v, 0, 1); err != nil {
		return volumetree.Entry{}, err
	}
	made := int64(0)
	e, err := with(s, v, func(t *volumetree.Tree) (e volumetree.Entry, err error) {
		e, made, err = t.MakeDir(path, parents, a)
		return e, err
	})
	return e, errors.Join(err, s.Files.Take(v, 0, min(made-1, 0)))
}

// Read opens a file; the caller closes it.
func (s *Service) Read(v volumetree.Ref, path string) (io.ReadCloser, volumetree.Entry, error) {
	t, err := s.open(v)
	if err != nil {
		return nil, volumetree.Entry{}, err
	}
	defer func() { _ = t.Close() }()
	f, e, err := t.Read(path)
	if err != nil {
		return nil, e, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(f, e.Size), f}, e, nil // a sandbox may make it longer as fast as it is read
}

// Upload is a file to write.
type Upload struct {
	Path string
	Body io.Reader
	// Size is the length of Body in bytes; -1 if it is unknown.
	Size int64
	// Force replaces a file that exists, and makes directories above it.
	Force bool
	volumetree.Attributes
}

// Write writes a file, whole or not at all.
func (s *Service) Write(v volumetree.Ref, up Upload) (volumetree.Entry, error) {
	if err := s.Gate.Err(); err != nil {
		return volumetree.Entry{}, err
	}
	// Refused before any of it is read.
	if err := s.Files.Take(v, max(up.Size, 0), 1); err != nil {
		return volumetree.Entry{}, err
	}
	_ = s.Files.Take(v, -max(up.Size, 0), 0) // as its bytes come
	body := &counted{Reader: up.Body, take: func(n int64) error { return s.Files.Take(v, n, 0) }}
	e, err := with(s, v, func(t *volumetree.Tree) (volumetree.Entry, error) {
		e, _, err := t.Write(up.Path, body, up.Force, up.Attributes)
		return e, err
	})
	if err != nil {
		_ = s.Files.Take(v, -body.n, -1) // returns what was not written
	}
	return e, err
}

// counted takes room for each byte that it passes.
type counted struct {
	io.Reader
	take func(n int64) error
	n    int64
}

// Read implements io.Reader.
func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	if n > 0 {
		if refused := c.take(int64(n)); refused != nil {
			return 0, refused
		}
		c.n += int64(n)
	}
	return n, err
}
