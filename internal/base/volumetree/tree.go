// Package volumetree reads and changes the files of one volume, for a process with more rights than the sandboxes that write
// them, while they write them.
//
// Every path is resolved below the volume's directory: a symbolic link that leads out of it, or an absolute one, is an error.
// Only regular files and directories are opened; other kinds are shown and removed. What a tree can make a call use is bounded:
// the lengths of paths, the depth, the entries of a list and of a measurement. Removals work whatever the depth.
//
// It has no locks: of two calls that change one path, either may win.
package volumetree

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Limits of paths.
const (
	maxPath  = 4096
	maxDepth = 128
	maxName  = 255
)

// UploadPrefix begins the names of files that are being written. Volumefs neither shows nor uploads them.
const UploadPrefix = ".barchan-upload-"

// Modes of what is made without one. Any user of a sandbox may write it: a volume's sandboxes share no users.
const (
	FileMode = 0o666
	DirMode  = 0o777
	// Owner is the user and the group of what is made without one, the first user of an image.
	Owner = 1000
)

// ErrFull means that a volume, or the disk that it is on, has no room.
var ErrFull = fmt.Errorf("volume full: %w", errs.ErrExhausted)

// Type is the kind of a file.
type Type string

// Types. Devices, pipes and sockets are Unknown.
const (
	Unknown   Type = "unknown"
	File      Type = "file"
	Directory Type = "directory"
	Symlink   Type = "symlink"
)

// Entry describes one file.
type Entry struct {
	// Path begins with a slash, which is the volume itself.
	Name, Path string
	Type       Type
	// Target is a symbolic link's.
	Target string
	// Size is in bytes. Mode has the permission bits alone.
	Size     int64
	Mode     uint32
	UID, GID uint32
	// Changed is the time of the last change of the file's attributes.
	Accessed, Modified, Changed time.Time
}

// Attributes are to be set. Nil: as they are, or the default of a new file.
type Attributes struct {
	UID, GID *uint32
	// Mode has permission bits alone.
	Mode *uint32
}

// Check refuses attributes that no file may have.
func (a Attributes) Check() error {
	const most = 1<<32 - 2 // the last one means "as it is"
	switch {
	case a.Mode != nil && *a.Mode > uint32(fs.ModePerm):
		return refuse(errs.ErrInvalid, "mode: %#o has more than the permission bits", *a.Mode)
	case a.UID != nil && *a.UID > most:
		return refuse(errs.ErrInvalid, "uid: must be from 0 to %d", uint32(most))
	case a.GID != nil && *a.GID > most:
		return refuse(errs.ErrInvalid, "gid: must be from 0 to %d", uint32(most))
	}
	return nil
}

func (a Attributes) owner(none int) (uid, gid int) {
	uid, gid = none, none
	if a.UID != nil {
		uid = int(*a.UID)
	}
	if a.GID != nil {
		gid = int(*a.GID)
	}
	return uid, gid
}

func (a Attributes) mode(none fs.FileMode) fs.FileMode {
	if a.Mode != nil {
		return fs.FileMode(*a.Mode)
	}
	return none
}

// Tree is an open volume. It is safe for concurrent use; Close ends it.
type Tree struct {
	root *os.Root
	// uploads is a directory on the same file system, which no sandbox sees.
	uploads string
}

// Open opens the directory of a volume. uploads is a directory of the same file system for files that are being written.
func Open(dir, uploads string) (*Tree, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open volume: %w", err)
	}
	return &Tree{root, uploads}, nil
}

// Close releases the directory.
func (t *Tree) Close() error { return t.root.Close() }

// clean returns a path as it is shown, and as it is resolved below the root.
func clean(name string) (shown, below string, err error) {
	if len(name) > maxPath || strings.ContainsRune(name, 0) {
		return "", "", refuse(errs.ErrInvalid, "path: must have at most %d bytes, none of them zero", maxPath)
	}
	shown = path.Clean("/" + name)
	if shown == "/" {
		return shown, ".", nil
	}
	below = shown[1:]
	parts := strings.Split(below, "/")
	if len(parts) > maxDepth {
		return "", "", refuse(errs.ErrInvalid, "path: must have at most %d elements", maxDepth)
	}
	for _, part := range parts {
		if len(part) > maxName {
			return "", "", refuse(errs.ErrInvalid, "path: an element has more than %d bytes", maxName)
		}
	}
	return shown, below, nil
}

// Stat describes one file. It does not follow a symbolic link at the end of the path.
func (t *Tree) Stat(name string) (Entry, error) {
	shown, below, err := clean(name)
	if err != nil {
		return Entry{}, err
	}
	return t.stat(shown, below)
}

func (t *Tree) stat(shown, below string) (Entry, error) {
	info, err := t.root.Lstat(below)
	if err != nil {
		return Entry{}, classify(shown, err)
	}
	e := entryOf(shown, info.Sys().(*syscall.Stat_t)) //nolint:forcetypeassert // on Linux
	if e.Type == Symlink {
		e.Target, _ = t.root.Readlink(below) // it may be gone
	}
	return e, nil
}

// SetAttributes changes the owner and the mode of a file, and describes it.
func (t *Tree) SetAttributes(name string, a Attributes) (Entry, error) {
	shown, below, err := clean(name)
	if err == nil {
		err = a.Check()
	}
	if err != nil {
		return Entry{}, err
	}
	if uid, gid := a.owner(-1); uid >= 0 || gid >= 0 { // before the mode, which a change of owner can clear
		if err := t.root.Chown(below, uid, gid); err != nil {
			return Entry{}, classify(shown, err)
		}
	}
	if a.Mode != nil {
		if err := t.root.Chmod(below, a.mode(0)); err != nil {
			return Entry{}, classify(shown, err)
		}
	}
	return t.stat(shown, below)
}

// Read opens a regular file, and describes it.
func (t *Tree) Read(name string) (*os.File, Entry, error) {
	shown, below, err := clean(name)
	if err != nil {
		return nil, Entry{}, err
	}
	// A pipe without a writer does not block the open, and no terminal becomes ours.
	f, err := t.root.OpenFile(below, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, Entry{}, classify(shown, err)
	}
	var st syscall.Stat_t
	err = errs.Retryable(syscall.Fstat(int(f.Fd()), &st)) //nolint:gosec // a descriptor is small
	if err == nil && st.Mode&syscall.S_IFMT != syscall.S_IFREG {
		err = refuse(errs.ErrInvalid, "path: %q is not a regular file", shown)
	}
	if err != nil {
		return nil, Entry{}, errors.Join(err, f.Close())
	}
	return f, entryOf(shown, &st), nil
}

func entryOf(shown string, st *syscall.Stat_t) Entry {
	e := Entry{
		Name: path.Base(shown), Path: shown, Type: Unknown, Size: st.Size, Mode: st.Mode & uint32(fs.ModePerm), UID: st.Uid, GID: st.Gid,
		Accessed: time.Unix(st.Atim.Unix()), Modified: time.Unix(st.Mtim.Unix()), Changed: time.Unix(st.Ctim.Unix()),
	}
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		e.Type = File
	case syscall.S_IFDIR:
		e.Type = Directory
	case syscall.S_IFLNK:
		e.Type = Symlink
	}
	return e
}

func refuse(kind error, format string, args ...any) error {
	return errs.Public(kind, fmt.Sprintf(format, args...))
}

// classify gives the error of a system call its kind and a text for users.
func classify(shown string, err error) error {
	is := func(kind error, text string) error {
		return errs.Public(fmt.Errorf("%w: %w", kind, err), fmt.Sprintf("path: %q %s", shown, text))
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return is(errs.ErrNotFound, "not found")
	case errors.Is(err, fs.ErrExist):
		return is(errs.ErrConflict, "exists")
	case errors.Is(err, unix.ENOTDIR):
		return is(errs.ErrInvalid, "has an element that is not a directory")
	case errors.Is(err, unix.EISDIR):
		return is(errs.ErrInvalid, "is a directory")
	case errors.Is(err, unix.ELOOP):
		return is(errs.ErrInvalid, "has too many symbolic links")
	case errors.Is(err, unix.ENXIO):
		return is(errs.ErrInvalid, "is not a regular file")
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return is(ErrFull, "does not fit: the volume's disk is full, or has the most files that it can have")
	case errors.Is(err, unix.ENAMETOOLONG):
		return is(errs.ErrInvalid, "is too long")
	case strings.Contains(err.Error(), "escapes from parent"): // os has no value for it
		return is(errs.ErrInvalid, "has a symbolic link that leads out of the volume")
	}
	return errs.Retryable(fmt.Errorf("volume path %s: %w", shown, err))
}
