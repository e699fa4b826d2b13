package volumetree

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
)

// MakeDir makes a directory, and with parents also those above it; then one that exists is no error. made gets the number of new directories.
func (t *Tree) MakeDir(name string, parents bool, a Attributes) (e Entry, made int64, err error) {
	shown, below, err := clean(name)
	if err == nil {
		err = a.Check()
	}
	if err != nil {
		return e, 0, err
	}
	if parents {
		made, err = t.makeParents(below, a)
	}
	if err != nil {
		return e, made, err
	}
	err = t.makeOne(below, a, a.mode(DirMode))
	switch {
	case err == nil:
		made++
	case !parents || !errors.Is(err, fs.ErrExist):
		return e, made, classify(shown, err)
	}
	e, err = t.stat(shown, below)
	if err == nil && e.Type != Directory && (!parents || e.Type != Symlink) {
		err = refuse(errs.ErrConflict, "path: %q exists, and is not a directory", shown)
	}
	return e, made, err
}

// makeParents makes the directories above a path.
func (t *Tree) makeParents(below string, a Attributes) (made int64, err error) {
	for i := range below {
		if below[i] != '/' {
			continue
		}
		switch err := t.makeOne(below[:i], a, DirMode); {
		case err == nil:
			made++
		case !errors.Is(err, fs.ErrExist):
			return made, classify("/"+below[:i], err)
		}
	}
	return made, nil
}

func (t *Tree) makeOne(below string, a Attributes, mode fs.FileMode) error {
	if below == "." {
		return fs.ErrExist
	}
	if err := t.root.Mkdir(below, mode); err != nil {
		return err
	}
	uid, gid := a.owner(Owner)
	if err := t.root.Lchown(below, uid, gid); err != nil {
		return err
	}
	return t.root.Chmod(below, mode) // beyond the umask
}

// Write writes a file from a body, whose reader bounds it. The file appears whole and durable, or not at all. With force
// the directories above it are made, and a file, link or pipe of its name is replaced; without, one that exists is an errs.ErrConflict.
// made counts the new files and directories.
func (t *Tree) Write(name string, body io.Reader, force bool, a Attributes) (e Entry, made int64, err error) {
	shown, below, err := clean(name)
	if err == nil {
		err = a.Check()
	}
	if err == nil && below == "." {
		err = refuse(errs.ErrInvalid, "path: must name a file")
	}
	if err != nil {
		return e, 0, err
	}
	if !force {
		if err := t.absent(shown, below); err != nil { // before the body is read
			return e, 0, err
		}
	} else if made, err = t.makeParents(below, a); err != nil {
		return e, made, err
	}
	dir, err := t.openDir(path.Dir(shown), path.Dir(below))
	if err != nil {
		return e, made, err
	}
	defer func() { _ = dir.Close() }()
	temp, err := t.upload(body, a)
	if err != nil {
		return e, made, err
	}
	defer func() { _ = os.Remove(temp) }()
	failpoint.Reach("volume/uploaded")
	flags := uint(unix.RENAME_NOREPLACE)
	if force {
		flags = 0
	}
	base := path.Base(below)
	if err := unix.Renameat2(unix.AT_FDCWD, temp, int(dir.Fd()), base, flags); err != nil { //nolint:gosec // a descriptor is small
		return e, made, classify(shown, err)
	}
	if err := dir.Sync(); err != nil {
		return e, made, classify(shown, err)
	}
	st, err := statAt(int(dir.Fd()), base) //nolint:gosec // a descriptor is small
	if err != nil {
		return e, made, classify(shown, err)
	}
	return entryOf(shown, st), made + 1, nil
}

func (t *Tree) absent(shown, below string) error {
	_, err := t.root.Lstat(below)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return classify(shown, err)
	}
	return refuse(errs.ErrConflict, "path: %q exists; set force to replace it", shown)
}

// upload writes a body to a file that no sandbox sees, and makes it durable.
func (t *Tree) upload(body io.Reader, a Attributes) (name string, err error) {
	f, err := os.CreateTemp(t.uploads, UploadPrefix)
	if err != nil {
		return "", errs.Retryable(fmt.Errorf("make file of upload: %w", err))
	}
	defer func() {
		if closed := f.Close(); err == nil && closed != nil {
			err = classify(filepath.Base(name), closed)
		}
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	if _, err := io.Copy(f, body); err != nil {
		if errs.Kind(err) != nil {
			return "", err
		}
		return "", classify("/", err)
	}
	uid, gid := a.owner(Owner)
	err = errors.Join(f.Chown(uid, gid), f.Chmod(a.mode(FileMode)), f.Sync())
	if err != nil {
		return "", errs.Retryable(fmt.Errorf("write upload: %w", err))
	}
	return f.Name(), nil
}

// RemoveUploads removes the files that an earlier process was writing to a directory of uploads.
func RemoveUploads(dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list uploads of volume: %w", err)
	}
	for _, f := range list {
		if strings.HasPrefix(strings.TrimPrefix(f.Name(), ".barchan-"), "upload-") { // both, as earlier versions had no dot
			if err := os.Remove(filepath.Join(dir, f.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("remove upload of volume: %w", err)
			}
		}
	}
	return nil
}
