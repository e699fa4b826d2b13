package filetree

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A pre-copy pays off above these sizes: the final copy must stat every entry again.
const (
	worthBytes   = 8 << 20
	worthEntries = 512
	// clockSlack is by how much a file system's time may be behind the clock.
	clockSlack = 100 * time.Millisecond
)

// errWorth ends a count.
var errWorth = errors.New("worth a pre-copy")

// Copy copies a directory tree with owners, modes, times, extended attributes, hard links, devices
// and holes. PreCopy does most of the work before the source must stop changing.
//
// The final copy skips an entry whose ctime is unchanged since the pre-copy and lies before the
// source was synced: a later write, also through a mapping, sets a new ctime. Each method may be
// called once, PreCopy is optional; calls must not overlap.
type Copy struct {
	dst, src string
	// ahead is the state of each entry before its pre-copy, by path; nil without a pre-copy. size is that of the paths.
	ahead map[string]seenEntry
	size  int
	// settled bounds the ctimes that the final copy relies on, in the file system's time.
	settled unix.Timespec
}

// seenEntry identifies a state of an entry.
type seenEntry struct {
	ino  uint64
	size int64
	ctim unix.Timespec
}

func seen(e entry) seenEntry { return seenEntry{ino: e.Ino, size: e.Size, ctim: e.Ctim} }

// NewCopy prepares a copy of src to the empty directory dst and touches nothing.
func NewCopy(dst, src string) *Copy { return &Copy{dst: dst, src: src} }

// PreCopy copies a large tree while the source may change. It leaves failing entries to FinalCopy.
func (t *Copy) PreCopy(ctx context.Context) error {
	if worth, err := worthIt(ctx, t.src); err != nil || !worth {
		return err
	}
	now := time.Now().Add(-clockSlack)
	if err := Sync(t.src); err != nil {
		return err
	}
	t.settled, t.ahead = unix.NsecToTimespec(now.UnixNano()), map[string]seenEntry{}
	return t.walk(ctx, &copier{root: t.dst, ahead: t})
}

// FinalCopy copies all that PreCopy did not, or that has changed since. The source must not change.
func (t *Copy) FinalCopy(ctx context.Context) error {
	return t.walk(ctx, &copier{root: t.dst, after: t})
}

func (t *Copy) walk(ctx context.Context, c *copier) error {
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
		return fmt.Errorf("stat %q: %w", t.src, err)
	}
	return c.fill(ctx, to, from, entry{at: from.self(), Stat_t: st})
}

// unchanged reports whether the pre-copy at dst equals the entry.
func (t *Copy) unchanged(dst string, e entry) bool {
	was, ok := t.ahead[e.rel]
	if !ok || was != seen(e) || e.kind() == unix.S_IFDIR || !before(e.Ctim, t.settled) {
		return false
	}
	var st unix.Stat_t // the pre-copy of a failed directory was discarded
	return unix.Lstat(dst, &st) == nil && st.Mode == e.Mode && st.Size == e.Size
}

func before(a, b unix.Timespec) bool { return a.Nano() < b.Nano() }

// worthIt reports whether a tree is large enough for a pre-copy.
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
			sub, err := f.open(e.at, e.rel)
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
	case errors.Is(err, errWorth), errors.Is(err, fs.ErrNotExist): // it is changing
		return true, nil
	default:
		return false, err
	}
}

// discard removes the copy of an entry.
func discard(to *folder, e entry) error {
	if err := os.RemoveAll(to.at(e.name)); err != nil {
		return fmt.Errorf("copy %q: %w", e.rel, err)
	}
	return nil
}

// forget removes entries from a copy that its source no longer has.
func (c *copier) forget(ctx context.Context, to *folder, have map[string]bool) error {
	if c.after == nil || c.after.ahead == nil {
		return nil
	}
	again, err := openFolder(to.self(), to.rel) // with its own read position
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

// copyAhead copies an entry of a source that may be changing, and ignores failures.
func (c *copier) copyAhead(ctx context.Context, to *folder, e entry) error {
	if c.ahead.size += len(e.rel) + nameCost; c.ahead.size <= maxHeld { // else it is copied again
		c.ahead.ahead[e.rel] = seen(e)
	}
	if err := c.copyNew(ctx, to, e); err != nil {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		delete(c.ahead.ahead, e.rel)
		return discard(to, e)
	}
	return nil
}

// copyAfter updates the copy of an entry.
func (c *copier) copyAfter(ctx context.Context, to *folder, e entry) error {
	was, ahead := c.after.ahead[e.rel]
	switch {
	case c.after.unchanged(to.at(e.name), e):
		if e.Nlink > 1 {
			return c.links.add(e)
		}
		return nil
	case ahead && e.kind() == unix.S_IFDIR && was.ino == e.Ino:
		return c.mergeFolder(ctx, to, e)
	case c.after.ahead != nil:
		if err := discard(to, e); err != nil {
			return err
		}
	}
	return c.copyNew(ctx, to, e)
}

// mergeFolder updates the copy of a directory.
func (c *copier) mergeFolder(ctx context.Context, to *folder, e entry) error {
	dst := to.at(e.name)
	var st unix.Stat_t
	if err := unix.Lstat(dst, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if err := os.RemoveAll(dst); err != nil {
			return fmt.Errorf("copy %q: %w", e.rel, err)
		}
		return c.copyFolder(ctx, to, e)
	}
	if err := dropAttributes(dst); err != nil { // the current ones are set afterwards
		return fmt.Errorf("copy %q: %w", e.rel, err)
	}
	return c.fillFolder(ctx, to, e)
}
