// Package durable has crash-safe file operations: files are replaced atomically, and a directory is
// locked by one process at a time.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// WriteFile writes a file atomically: after a crash at any time it has the old or the new content. The
// directory must exist.
func WriteFile(path string, content []byte, mode fs.FileMode) error {
	if err := replace(path, content, mode); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func replace(path string, content []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // the error below matters more
		return err
	}
	return syncDir(filepath.Dir(path))
}

// Remove removes a file durably: no later crash restores it. A missing file is success.
func Remove(path string) error {
	err := os.Remove(path)
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// syncDir makes a rename or a removal in a directory survive a crash.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Lock locks a file for this process, and creates it if missing. The kernel releases the lock when the
// process ends; the file stays. If another process holds it, the error is an errs.ErrConflict, and
// holder is that process's ID if known.
func Lock(path string) (release func() error, holder string, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, "", fmt.Errorf("open lock: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		text, _ := os.ReadFile(path) // an unknown holder is left empty
		err = fmt.Errorf("%s is locked by another process: %w", path, errs.ErrConflict)
		return nil, strings.TrimSpace(string(text)), errors.Join(err, f.Close())
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())), 0)
	}
	if err != nil {
		return nil, "", errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f.Close, "", nil
}

// CheckWrites writes a small file in a directory, syncs it, renames it and removes it: all operations
// that this package relies on. The error is the kernel's.
func CheckWrites(dir string) error {
	path := filepath.Join(dir, ".write-check")
	if err := WriteFile(path, []byte("ok\n"), 0o600); err != nil {
		return err
	}
	return Remove(path)
}

// Reserve allocates size bytes of disk in a placeholder file, which can be removed when the space is
// needed. An existing one of at least that size is left.
func Reserve(path string, size int64) error {
	if info, err := os.Stat(path); err == nil && info.Size() >= size {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("reserve room: %w", err)
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	if err = errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(path) // frees the partial allocation
		return fmt.Errorf("reserve room in %s: %w", path, err)
	}
	return nil
}
