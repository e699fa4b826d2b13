package bundle

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// CheckFree returns an errs.ErrConflict if a file of the name exists.
func CheckFree(name string) error {
	if _, err := os.Lstat(name); !errors.Is(err, fs.ErrNotExist) {
		if err != nil {
			return fmt.Errorf("--bundle: %w", err)
		}
		return fmt.Errorf("--bundle: %s exists; give another name, or remove it: %w", name, errs.ErrConflict)
	}
	return nil
}

// WriteFile writes the archive to a new file that only its owner may read, and returns its size. It refuses an existing file
// with an errs.ErrConflict. A file that could not be written is removed.
func (b *Bundle) WriteFile(name string) (size int64, err error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return 0, CheckFree(name)
	}
	if err != nil {
		return 0, fmt.Errorf("--bundle: %w", err)
	}
	err = b.write(f, strings.TrimSuffix(path.Base(name), ".tar.gz"))
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		size, err = f.Seek(0, io.SeekEnd)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return 0, fmt.Errorf("--bundle: %w", errors.Join(err, os.Remove(name)))
	}
	return size, nil
}

// write writes a compressed tar whose files are in one directory.
func (b *Bundle) write(w io.Writer, dir string) error {
	zip := gzip.NewWriter(w)
	out := tar.NewWriter(zip)
	for _, f := range b.files {
		h := &tar.Header{Name: path.Join(dir, f.name), Mode: 0o600, Size: int64(len(f.content)), ModTime: b.Manifest.CreatedAt, Format: tar.FormatPAX}
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		if _, err := out.Write(f.content); err != nil {
			return err
		}
	}
	return errors.Join(out.Close(), zip.Close())
}
