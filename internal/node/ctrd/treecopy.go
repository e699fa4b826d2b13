package ctrd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"
)

// A copy is made ahead, while the source is still being written, only where this is worth a second
// look at everything.
const (
	worthBytes   = 8 << 20
	worthEntries = 512
	// clockSlack is by how much a file system's time may be behind the clock.
	clockSlack = 100 * time.Millisecond
)

// errWorth ends a count.
var errWorth = errors.New("enough to be copied ahead")

// TreeCopy copies a directory tree with all that a file system knows of it: owners, modes, times,
// extended attributes, hard links, devices, holes. It can do most of the work before the source is
// held still.
//
// What was copied ahead counts as unchanged if its time of change is the same and lies before all
// that was written till then had reached the disk: a later write, through a mapping too, makes the
// file system set another. Each method may be called once, Ahead not at all; no two at a time.
type TreeCopy struct {
	dst, src string
	// ahead is what was seen of the source before it was copied, by path; nil where nothing was.
	ahead map[string]seenEntry
	// settled is before what the ahead copy relies on, in the file system's time.
	settled unix.Timespec
}

// seenEntry identifies a state of an entry.
type seenEntry struct {
	ino  uint64
	size int64
	ctim unix.Timespec
}

func seen(e entry) seenEntry { return seenEntry{ino: e.Ino, size: e.Size, ctim: e.Ctim} }

// NewTreeCopy prepares the copy of what is in src, and of what src itself is, to the empty directory
// dst. It touches nothing.
func NewTreeCopy(dst, src string) *TreeCopy { return &TreeCopy{dst: dst, src: src} }

// Ahead copies what is there now if it is much, while the source may be written to. What cannot be
// copied is left for Take.
func (t *TreeCopy) PreCopy(ctx context.Context) error {
	if worth, err := worthIt(ctx, t.src); err != nil || !worth {
		return err
	}
	now := time.Now().Add(-clockSlack)
	if err := syncTree(t.src); err != nil {
		return err
	}
	t.settled, t.ahead = unix.NsecToTimespec(now.UnixNano()), map[string]seenEntry{}
	return t.walk(ctx, &copier{root: t.dst, links: map[uint64]string{}, ahead: t})
}

// Take copies what Ahead did not, or what has changed since. The source must be held still.
func (t *TreeCopy) FinalCopy(ctx context.Context) error {
	return t.walk(ctx, &copier{root: t.dst, links: map[uint64]string{}, after: t})
}

func (t *TreeCopy) walk(ctx context.Context, c *copier) error {
	from, err := openFolder(t.src, "")
	if err != nil {
		return err
	}
	defer func() { _ = from.file.Close() }()
	to, err := openFolder(t.dst, "")
	if err != nil {
		return err
	}
	defer func() { _ = to.file.Close() }()
	var st unix.Stat_t
	if err := unix.Fstat(int(from.file.Fd()), &st); err != nil {
		return fmt.Errorf("look at %q: %w", t.src, err)
	}
	return c.fill(ctx, to, from, entry{at: from.self(), Stat_t: st})
}

// unchanged reports whether the copy of an entry that was made ahead, at dst, is the entry as it is now.
func (t *TreeCopy) unchanged(dst string, e entry) bool {
	was, ok := t.ahead[e.rel]
	if !ok || was != seen(e) || e.kind() == unix.S_IFDIR || !before(e.Ctim, t.settled) {
		return false
	}
	var st unix.Stat_t // it may have gone with a directory that could not be copied
	return unix.Lstat(dst, &st) == nil && st.Mode == e.Mode && st.Size == e.Size
}

func before(a, b unix.Timespec) bool { return a.Nano() < b.Nano() }

// worthIt reports whether there is so much in a tree that copying it takes long.
func worthIt(ctx context.Context, dir string) (bool, error) {
	var bytes int64
	entries := 0
	var count func(f *folder) error
	count = func(f *folder) error {
		defer func() { _ = f.file.Close() }()
		return f.each(ctx, func(e entry) error {
			bytes += e.Blocks * 512
			if entries++; bytes > worthBytes || entries > worthEntries {
				return errWorth
			}
			if e.kind() != unix.S_IFDIR {
				return nil
			}
			sub, err := openFolder(e.at, e.rel)
			if err != nil {
				return err
			}
			return count(sub)
		})
	}
	f, err := openFolder(dir, "")
	if err != nil {
		return false, err
	}
	switch err := count(f); {
	case errors.Is(err, errWorth), errors.Is(err, fs.ErrNotExist): // it changes; look closer
		return true, nil
	default:
		return false, err
	}
}

// discard removes what was copied of an entry.
func discard(to *folder, e entry) error {
	if err := os.RemoveAll(to.at(e.name)); err != nil {
		return fmt.Errorf("copy %q: %w", e.rel, err)
	}
	return nil
}

// forget removes from a copy what its source has no more.
func (c *copier) forget(ctx context.Context, to *folder, have map[string]bool) error {
	if c.after == nil || c.after.ahead == nil {
		return nil
	}
	again, err := openFolder(to.self(), to.rel) // its position is of its own
	if err != nil {
		return err
	}
	defer func() { _ = again.file.Close() }()
	return again.each(ctx, func(e entry) error {
		if have[e.name] {
			return nil
		}
		return discard(to, e)
	})
}

// copyAhead copies an entry of a source that may be changing, and does not mind if it cannot.
func (c *copier) copyAhead(ctx context.Context, to *folder, e entry) error {
	c.ahead.ahead[e.rel] = seen(e)
	if err := c.copyNew(ctx, to, e); err != nil {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		delete(c.ahead.ahead, e.rel)
		return discard(to, e)
	}
	return nil
}

// copyAfter brings the copy of an entry up to date.
func (c *copier) copyAfter(ctx context.Context, to *folder, e entry) error {
	was, ahead := c.after.ahead[e.rel]
	switch {
	case c.after.unchanged(to.at(e.name), e):
		if e.Nlink > 1 {
			c.links[e.Ino] = path.Join(c.root, e.rel)
		}
		return nil
	case ahead && e.kind() == unix.S_IFDIR && was.ino == e.Ino:
		return c.mergeFolder(ctx, to.at(e.name), e)
	case c.after.ahead != nil:
		if err := discard(to, e); err != nil {
			return err
		}
	}
	return c.copyNew(ctx, to, e)
}

// mergeFolder goes through a directory of which there is a copy.
func (c *copier) mergeFolder(ctx context.Context, dst string, e entry) error {
	var st unix.Stat_t
	if err := unix.Lstat(dst, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if err := os.RemoveAll(dst); err != nil {
			return fmt.Errorf("copy %q: %w", e.rel, err)
		}
		return c.copyFolder(ctx, dst, e)
	}
	if err := dropAttributes(dst); err != nil { // those that it has now are set again
		return fmt.Errorf("copy %q: %w", e.rel, err)
	}
	return c.fillFolder(ctx, dst, e)
}
