package filetree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// copyChunk is the number of bytes between two checks of the context.
const copyChunk = 64 << 20

// Limits of a tree that is copied: programs in a sandbox can make one that takes all memory of the server.
const (
	// maxDepth bounds nested directories: each is two descriptors while it is copied.
	maxDepth = 256
	// maxPath bounds a path from the root of the tree, in bytes.
	maxPath = unix.PathMax
	// maxHeld bounds the names that are in memory at a time: those of a directory and of the ones above it, in bytes. It
	// also bounds the paths of a copy's hard links, and of a pre-copy.
	maxHeld = 64 << 20
	// nameCost is counted for each name beside its text, and namesAtOnce are read at a time.
	nameCost    = 32
	namesAtOnce = 4096
)

// folder is an open directory. Entries are named through its descriptor, so that a rename or link
// above it cannot redirect the copy.
type folder struct {
	file *os.File
	rel  string // from the tree's root, for messages and links
	// depth is that of the directory, and held the size of the names in memory of all that is open above it.
	depth, held int
}

// open opens a directory in another one.
func (f *folder) open(at, rel string) (*folder, error) {
	if f.depth+1 > maxDepth {
		return nil, refuse(rel, "has more than %d directories above it", maxDepth)
	}
	below, err := openFolder(at, rel)
	if err == nil {
		below.depth, below.held = f.depth+1, f.held
	}
	return below, err
}

// refuse returns why a tree is not copied.
func refuse(rel, why string, args ...any) error {
	const most = 100
	if len(rel) > most {
		rel = rel[:most] + "…"
	}
	return fmt.Errorf("%q %s: %w", rel, fmt.Sprintf(why, args...), errs.ErrInvalid)
}

func openFolder(at, rel string) (*folder, error) {
	fd, err := unix.Open(at, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open directory %q: %w", rel, err)
	}
	return &folder{file: os.NewFile(uintptr(fd), rel), rel: rel}, nil
}

// at is a path to an entry; callers must not follow links there.
func (f *folder) at(name string) string {
	return "/proc/self/fd/" + strconv.Itoa(int(f.file.Fd())) + "/" + name
}

// self is a path to the directory itself.
func (f *folder) self() string { return f.at(".") }

// entry is something in a tree.
type entry struct {
	name, at, rel string
	unix.Stat_t
}

func (e entry) kind() uint32 { return e.Mode & unix.S_IFMT }

// whiteout reports whether an entry of an upper directory hides one of the layers below.
func (e entry) whiteout() bool { return e.kind() == unix.S_IFCHR && e.Rdev == 0 }

// names reads all names of the directory. They count as held from then on, for what is opened in it.
func (f *folder) names() (names []string, err error) {
	for {
		some, err := f.file.Readdirnames(namesAtOnce)
		for _, name := range some {
			f.held += len(name) + nameCost
		}
		names = append(names, some...)
		switch {
		case errors.Is(err, io.EOF):
			return names, nil
		case err != nil:
			return nil, fmt.Errorf("read directory %q: %w", f.rel, err)
		case f.held > maxHeld:
			return nil, refuse(f.rel, "and the directories above it have too many entries: their names have more than %d MiB", maxHeld>>20)
		}
	}
}

// each calls do for each entry of the directory, by name, until ctx ends.
func (f *folder) each(ctx context.Context, do func(entry) error) error {
	names, err := f.names()
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		if len(f.rel)+1+len(name) > maxPath {
			return refuse(f.rel, "has a path of more than %d bytes below it", maxPath)
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
		e := entry{name: name, at: f.at(name), rel: path.Join(f.rel, name)}
		if err := unix.Lstat(e.at, &e.Stat_t); errors.Is(err, unix.ENOENT) {
			continue // removed meanwhile
		} else if err != nil {
			return fmt.Errorf("stat %q: %w", e.rel, err)
		}
		if err := do(e); err != nil {
			return err
		}
	}
	return nil
}

// links are the files with several names, by inode number: the first path of each, from the root.
type links struct {
	first map[uint64]string
	size  int
}

func (l *links) add(e entry) error {
	if l.size += len(e.rel) + nameCost; l.size > maxHeld {
		return refuse(e.rel, "is one of too many hard links: their paths have more than %d MiB", maxHeld>>20)
	}
	if l.first == nil {
		l.first = map[uint64]string{}
	}
	l.first[e.Ino] = e.rel
	return nil
}

// copier copies a tree with owners, modes, times to the nanosecond, extended attributes, hard
// links, devices (whiteouts too), sockets and holes.
type copier struct {
	root  string // of the copy
	links links  // by the first path in the copy
	// ahead records a pre-copy; after is the record that a final copy uses. At most one is set.
	ahead, after *Copy
}

// fill copies the entries of a directory and then its own properties, times last.
func (c *copier) fill(ctx context.Context, to, from *folder, self entry) error {
	have := map[string]bool{}
	err := from.each(ctx, func(e entry) error {
		have[e.name] = true
		to.held = from.held // of what is opened in it
		return c.copy(ctx, to, e)
	})
	if err == nil {
		err = c.forget(ctx, to, have)
	}
	if err != nil {
		return err
	}
	return c.properties(to.self(), self)
}

func (c *copier) copy(ctx context.Context, to *folder, e entry) error {
	switch {
	case c.ahead != nil:
		return c.copyAhead(ctx, to, e)
	case c.after != nil:
		return c.copyAfter(ctx, to, e)
	default:
		return c.copyNew(ctx, to, e)
	}
}

// copyNew copies an entry to an unused name.
func (c *copier) copyNew(ctx context.Context, to *folder, e entry) error {
	dst := to.at(e.name)
	if e.kind() != unix.S_IFDIR && e.Nlink > 1 {
		if first, ok := c.links.first[e.Ino]; ok {
			if err := os.Link(path.Join(c.root, first), dst); err != nil {
				return fmt.Errorf("link %q: %w", e.rel, err)
			}
			return nil
		}
		if err := c.links.add(e); err != nil {
			return err
		}
	}
	var err error
	switch e.kind() {
	case unix.S_IFDIR:
		return c.copyFolder(ctx, to, e)
	case unix.S_IFREG:
		err = copyFile(ctx, dst, e)
	case unix.S_IFLNK:
		var target string
		if target, err = os.Readlink(e.at); err == nil {
			err = os.Symlink(target, dst)
		}
	default:
		err = unix.Mknod(dst, e.Mode, int(e.Rdev))
	}
	if err != nil {
		return fmt.Errorf("copy %q: %w", e.rel, err)
	}
	return c.properties(dst, e)
}

func (c *copier) copyFolder(ctx context.Context, to *folder, e entry) error {
	dst := to.at(e.name)
	if err := os.Mkdir(dst, 0o700); err != nil {
		return fmt.Errorf("copy %q: %w", e.rel, err)
	}
	return c.fillFolder(ctx, to, e)
}

func (c *copier) fillFolder(ctx context.Context, above *folder, e entry) error {
	from, err := above.open(e.at, e.rel)
	if err != nil {
		return err
	}
	defer func() { _ = from.file.Close() }()
	to, err := above.open(above.at(e.name), e.rel)
	if err != nil {
		return err
	}
	defer func() { _ = to.file.Close() }()
	return c.fill(ctx, to, from, e)
}

// properties sets owner, attributes, mode and times. A change of owner clears modes and attributes,
// so it comes first.
func (c *copier) properties(dst string, e entry) error {
	err := os.Lchown(dst, int(e.Uid), int(e.Gid))
	if err == nil {
		err = copyAttributes(dst, e.at)
	}
	if err == nil && e.kind() != unix.S_IFLNK {
		err = unix.Chmod(dst, e.Mode&^unix.S_IFMT)
	}
	if err == nil {
		err = unix.UtimesNanoAt(unix.AT_FDCWD, dst, []unix.Timespec{e.Atim, e.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err != nil {
		return fmt.Errorf("set properties of %q: %w", e.rel, err)
	}
	return nil
}

// copyFile copies content without holes.
func copyFile(ctx context.Context, dst string, e entry) error {
	src, err := os.OpenFile(e.at, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	to, err := os.OpenFile(dst, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = to.Close() }()
	if err := to.Truncate(e.Size); err != nil {
		return err
	}
	for at := int64(0); at < e.Size; {
		begin, err := src.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		} else if err != nil {
			return err
		}
		end, err := src.Seek(begin, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if at, err = copyRange(to, src, begin, min(end, begin+copyChunk)); err != nil {
			return err
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
	}
	return to.Close()
}

// copyRange copies in the kernel, which shares blocks if the file system can.
func copyRange(to, src *os.File, begin, end int64) (at int64, err error) {
	if _, err := src.Seek(begin, io.SeekStart); err != nil {
		return begin, err
	}
	if _, err := to.Seek(begin, io.SeekStart); err != nil {
		return begin, err
	}
	n, err := io.CopyN(to, src, end-begin) // copy_file_range if possible
	return begin + n, err
}

// Attributes reads the extended attributes of a path, which it does not follow.
func Attributes(at string) (map[string][]byte, error) {
	size, err := unix.Llistxattr(at, nil)
	if errors.Is(err, unix.ENOTSUP) || (err == nil && size == 0) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	b := make([]byte, size)
	if size, err = unix.Llistxattr(at, b); err != nil || size == 0 { // an overlay reports a larger size than it fills
		return nil, err
	}
	found := map[string][]byte{}
	for name := range strings.SplitSeq(strings.TrimRight(string(b[:size]), "\x00"), "\x00") {
		size, err := unix.Lgetxattr(at, name, nil)
		if err != nil {
			return nil, fmt.Errorf("attribute %q: %w", name, err)
		}
		value := make([]byte, size)
		if size > 0 {
			if size, err = unix.Lgetxattr(at, name, value); err != nil {
				return nil, fmt.Errorf("attribute %q: %w", name, err)
			}
		}
		found[name] = value[:size]
	}
	return found, nil
}

func copyAttributes(dst, src string) error {
	found, err := Attributes(src)
	if err != nil {
		return err
	}
	for name, value := range found {
		if err := unix.Lsetxattr(dst, name, value, 0); err != nil {
			return fmt.Errorf("attribute %q: %w", name, err)
		}
	}
	return nil
}

func dropAttributes(at string) error {
	found, err := Attributes(at)
	if err != nil {
		return err
	}
	for name := range found {
		if err := unix.Lremovexattr(at, name); err != nil && !errors.Is(err, unix.ENODATA) {
			return fmt.Errorf("attribute %q: %w", name, err)
		}
	}
	return nil
}

// Sync makes all writes to a directory's file system durable.
func Sync(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("sync the file system of %s: %w", dir, err)
	}
	return nil
}
