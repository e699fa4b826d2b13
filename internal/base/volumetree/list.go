package volumetree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Limits of lists and measurements.
const (
	// MaxListDepth bounds the directories in each other of one list.
	MaxListDepth = 10
	// MaxListEntries bounds the entries of one list.
	MaxListEntries = 10_000
	// MaxFiles bounds the files that are measured, and so those of a volume.
	MaxFiles = 1_000_000
	// batch is how many names are read at once.
	batch = 512
	// maxLinked bounds the files with several names that a measurement remembers; more of them count once a name.
	maxLinked = 1 << 16
)

// List describes what is in a directory, and in those below it, down to a depth from 1 to MaxListDepth. It follows no
// symbolic link below the directory. What is removed meanwhile may be missing.
func (t *Tree) List(ctx context.Context, name string, depth int) ([]Entry, error) {
	shown, below, err := clean(name)
	if err != nil {
		return nil, err
	}
	if depth < 1 || depth > MaxListDepth {
		return nil, refuse(errs.ErrInvalid, "depth: must be from 1 to %d", MaxListDepth)
	}
	dir, err := t.openDir(shown, below)
	if err != nil {
		return nil, err
	}
	list := []Entry{}
	err = walk(ctx, dir, shown, depth, func(parent int, e Entry, _ *syscall.Stat_t) error {
		if len(list) == MaxListEntries {
			return refuse(errs.ErrTooLarge, "path: %q has more than %d entries; list with a smaller depth, or the directories in it", shown, MaxListEntries)
		}
		if e.Type == Symlink {
			e.Target = linkTarget(parent, e.Name)
		}
		list = append(list, e)
		return nil
	})
	return list, err
}

func (t *Tree) openDir(shown, below string) (*os.File, error) {
	dir, err := t.root.OpenFile(below, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENOTDIR) {
		return nil, refuse(errs.ErrInvalid, "path: %q is not a directory", shown)
	}
	if err != nil {
		return nil, classify(shown, err)
	}
	return dir, nil
}

// Usage is what the files of a volume take.
type Usage struct {
	// Bytes are of disk. Files counts directories too.
	Bytes, Files int64
	// Partial: there are more files than MaxFiles, or directories deeper than paths may be. The rest is not counted.
	Partial bool
}

var errPartial = errors.New("too many files")

// Measure walks all files.
func (t *Tree) Measure(ctx context.Context) (u Usage, err error) {
	dir, err := t.openDir("/", ".")
	if err != nil {
		return u, err
	}
	type inode struct{ dev, ino uint64 }
	linked := map[inode]bool{}
	err = walk(ctx, dir, "/", maxDepth+1, func(_ int, e Entry, st *syscall.Stat_t) error {
		if u.Files == MaxFiles || strings.Count(e.Path, "/") > maxDepth {
			return errPartial
		}
		u.Files++
		if st.Nlink > 1 && e.Type != Directory {
			one := inode{st.Dev, st.Ino}
			if linked[one] {
				return nil
			}
			if len(linked) < maxLinked {
				linked[one] = true
			}
		}
		u.Bytes += st.Blocks * blockSize
		return nil
	})
	if errors.Is(err, errPartial) {
		u.Partial, err = true, nil
	}
	return u, err
}

// blockSize is the unit of Stat_t.Blocks, in bytes.
const blockSize = 512

// visit gets a file's entry, with the descriptor of its directory.
type visit func(parent int, e Entry, st *syscall.Stat_t) error

// walk visits what is in an open directory, down to a depth, and closes it. It has one directory open for each level.
func walk(ctx context.Context, dir *os.File, shown string, depth int, see visit) (err error) {
	defer func() { err = errors.Join(err, dir.Close()) }()
	fd := int(dir.Fd()) //nolint:gosec // a descriptor is small
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		names, err := dir.ReadDir(batch)
		if errors.Is(err, io.EOF) || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return classify(shown, err)
		}
		for _, found := range names {
			if err := enter(ctx, fd, path.Join(shown, found.Name()), found.Name(), depth, see); err != nil {
				return err
			}
		}
	}
}

// enter visits one file, and what is in it.
func enter(ctx context.Context, fd int, shown, name string, depth int, see visit) error {
	st, err := statAt(fd, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return classify(shown, err)
	}
	e := entryOf(shown, st)
	e.Name = name
	if err := see(fd, e, st); err != nil || e.Type != Directory || depth <= 1 {
		return err
	}
	sub, err := openAt(fd, name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil // another file has its name now
	}
	if err != nil {
		return classify(shown, err)
	}
	return walk(ctx, sub, shown, depth-1, see)
}

func statAt(fd int, name string) (*syscall.Stat_t, error) {
	var u unix.Stat_t
	if err := unix.Fstatat(fd, name, &u, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, err
	}
	return &syscall.Stat_t{
		Dev: u.Dev, Ino: u.Ino, Nlink: u.Nlink, Mode: u.Mode, Uid: u.Uid, Gid: u.Gid, Size: u.Size, Blocks: u.Blocks,
		Atim: syscall.Timespec(u.Atim), Mtim: syscall.Timespec(u.Mtim), Ctim: syscall.Timespec(u.Ctim),
	}, nil
}

// openAt opens a directory in another, and no symbolic link to one, nor what is mounted there: a removal must not reach into it.
func openAt(fd int, name string) (*os.File, error) {
	sub, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	var above, below unix.Stat_t
	if err := errors.Join(unix.Fstat(fd, &above), unix.Fstat(sub, &below)); err != nil || above.Dev != below.Dev {
		_ = unix.Close(sub)
		return nil, errors.Join(err, fmt.Errorf("%s is mounted: %w", name, unix.EXDEV))
	}
	return os.NewFile(uintptr(sub), name), nil
}

func linkTarget(fd int, name string) string {
	buf := make([]byte, maxPath)
	n, err := unix.Readlinkat(fd, name, buf)
	if err != nil {
		return ""
	}
	return string(buf[:n])
}
