package durable

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const (
	// namesAtOnce are read from a directory at a time.
	namesAtOnce = 1024
	// maxPending bounds the names of directories that a measurement holds, in bytes, and maxLinked the files with several
	// names. Directories beyond are not entered, and files beyond count once a name.
	maxPending = 64 << 20
	maxLinked  = 1 << 20
)

// Free returns how many bytes are free on the disk of a directory, for processes without privileges.
func Free(dir string) (int64, error) {
	var disk unix.Statfs_t
	if err := unix.Statfs(dir, &disk); err != nil {
		return 0, fmt.Errorf("read free space of %s: %w", dir, err)
	}
	return int64(disk.Bavail) * disk.Bsize, nil //nolint:gosec // no disk has 2^63 bytes
}

// Usage returns how many bytes the files of a tree take on disk; a file with several names counts once. Programs may change
// the tree meanwhile; then what they move may be missing. No depth takes descriptors, and none is too deep.
func Usage(ctx context.Context, dir string) (sum int64, err error) {
	m := measurement{linked: map[inode]bool{}}
	at, err := os.Open(dir)
	if err == nil {
		err = m.measure(ctx, at)
	}
	if err != nil {
		return 0, fmt.Errorf("measure files: %w", err)
	}
	return m.sum, nil
}

type inode struct{ dev, ino uint64 }

// level is a directory on the way to the one that is open, with the directories in it that are still to be measured.
type level struct {
	inode

	names []string
}

type measurement struct {
	sum     int64
	linked  map[inode]bool
	pending int
	path    []level
}

// measure counts what is in an open directory, and closes it. One directory is open at a time.
func (m *measurement) measure(ctx context.Context, at *os.File) (err error) {
	defer func() { _ = at.Close() }()
	if err := m.enter(ctx, at, true); err != nil {
		return err
	}
	for {
		top := &m.path[len(m.path)-1]
		below := ".."
		if n := len(top.names); n > 0 {
			below, top.names = top.names[n-1], top.names[:n-1]
			m.pending -= len(below)
		} else if m.path = m.path[:len(m.path)-1]; len(m.path) == 0 {
			return nil
		}
		next, err := openIn(at, below)
		if gone(err) && below != ".." {
			continue
		} else if err != nil {
			return err
		}
		_ = at.Close()
		at = next
		if below != ".." {
			err = m.enter(ctx, at, false)
		} else if st, failed := statOf(at); failed != nil || st != m.path[len(m.path)-1].inode {
			return failed // moved: the way back is lost
		}
		if err != nil {
			return err
		}
	}
}

// enter counts the entries of a directory; the root counts itself.
func (m *measurement) enter(ctx context.Context, at *os.File, root bool) error {
	here := level{}
	var err error
	if here.inode, err = statOf(at); err != nil {
		return err
	}
	if root {
		m.count(at, ".")
	}
	for {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		names, err := at.Readdirnames(namesAtOnce)
		for _, name := range names {
			if m.count(at, name) && m.pending+len(name) <= maxPending {
				m.pending += len(name)
				here.names = append(here.names, name)
			}
		}
		if errors.Is(err, io.EOF) || gone(err) {
			m.path = append(m.path, here)
			return nil
		} else if err != nil {
			return err
		}
	}
}

// count counts an entry, unless it is gone, and reports whether it is a directory.
func (m *measurement) count(in *os.File, name string) (dir bool) {
	var st unix.Stat_t
	if unix.Fstatat(int(in.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return false
	}
	dir = st.Mode&unix.S_IFMT == unix.S_IFDIR
	if one := (inode{st.Dev, st.Ino}); !dir && st.Nlink > 1 {
		if m.linked[one] {
			return false
		}
		if len(m.linked) < maxLinked {
			m.linked[one] = true
		}
	}
	m.sum += st.Blocks * 512
	return dir
}

func openIn(at *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(at.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func statOf(f *os.File) (inode, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return inode{st.Dev, st.Ino}, err
}

// gone reports whether another process has removed or replaced a directory.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}
