package filetree_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree/filetreetest"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// old gives all that is in a tree a time of change that a copy made ahead may rely on, by waiting for
// the file system's clock to pass it.
func old(t *testing.T, dir string) {
	t.Helper()
	for {
		now := time.Now().Add(-2 * filetree.ClockSlack)
		newest := time.Time{}
		must(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			var st unix.Stat_t
			err = unix.Lstat(path, &st)
			if at := time.Unix(st.Ctim.Unix()); at.After(newest) {
				newest = at
			}
			return err
		}))
		if newest.Before(now) {
			return
		}
	}
}

func root(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for devices and trusted attributes")
	}
}

// bulky fills a directory with more than is copied at once.
func bulky(t *testing.T, dir string) {
	t.Helper()
	for i := range 40 {
		sub := filepath.Join(dir, fmt.Sprint("d", i%8))
		must(t, os.MkdirAll(sub, 0o755))
		must(t, os.WriteFile(filepath.Join(sub, fmt.Sprint("f", i)), bytes.Repeat([]byte{byte(i)}, 300_000), 0o640))
	}
	must(t, os.Link(filepath.Join(dir, "d0", "f0"), filepath.Join(dir, "d1", "f0-too")))
	must(t, os.Symlink("nowhere", filepath.Join(dir, "d2", "link")))
	must(t, unix.Lsetxattr(filepath.Join(dir, "d3"), "trusted.test", []byte("x"), 0))
}

func TestCopyAhead(t *testing.T) {
	root(t)
	for name, change := range map[string]func(dir string) error{
		"nothing": func(string) error { return nil },
		"content of the same size": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "d0", "f8"), bytes.Repeat([]byte{'!'}, 300_000), 0o600)
		},
		"through a mapping": func(dir string) error {
			f, err := os.OpenFile(filepath.Join(dir, "d1", "f1"), os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }()
			b, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				return err
			}
			b[7] = '!'
			return unix.Munmap(b)
		},
		"removed": func(dir string) error { return os.RemoveAll(filepath.Join(dir, "d5")) },
		"replaced by a directory": func(dir string) error {
			at := filepath.Join(dir, "d6", "f6")
			if err := os.Remove(at); err != nil {
				return err
			}
			return os.MkdirAll(filepath.Join(at, "below"), 0o700)
		},
		"directory replaced": func(dir string) error {
			if err := os.Rename(filepath.Join(dir, "d7"), filepath.Join(dir, "moved")); err != nil {
				return err
			}
			return os.Symlink("moved", filepath.Join(dir, "d7"))
		},
		"one of two links": func(dir string) error {
			at := filepath.Join(dir, "d1", "f0-too")
			if err := os.Remove(at); err != nil {
				return err
			}
			return os.WriteFile(at, []byte("my own"), 0o600)
		},
		"both of two links": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "d1", "f0-too"), []byte("shared"), 0o600)
		},
		"mode":      func(dir string) error { return os.Chmod(filepath.Join(dir, "d2", "f2"), 0o4711) },
		"attribute": func(dir string) error { return unix.Lremovexattr(filepath.Join(dir, "d3"), "trusted.test") },
		"new":       func(dir string) error { return os.WriteFile(filepath.Join(dir, "new"), []byte("new"), 0o600) },
		"whiteout":  func(dir string) error { return unix.Mknod(filepath.Join(dir, "d4", "gone"), unix.S_IFCHR, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			src, dst := t.TempDir(), t.TempDir()
			bulky(t, src)
			old(t, src)
			c := filetree.NewCopy(dst, src)
			must(t, c.PreCopy(t.Context()))
			if c.Ahead() < 40 {
				t.Fatalf("%d entries were copied ahead", c.Ahead())
			}
			must(t, change(src))
			must(t, c.FinalCopy(t.Context()))
			filetreetest.Same(t, name, filetreetest.Describe(t, dst), filetreetest.Describe(t, src))
		})
	}
}

// What was copied ahead is not copied again, and what was changing then is.
func TestCopyAheadIsOfUse(t *testing.T) {
	root(t)
	src := t.TempDir()
	bulky(t, src)
	old(t, src)
	fresh := filepath.Join(src, "d0", "fresh")
	var dst string
	var c *filetree.Copy
	eventually.True(t, "a copy ahead begins while a file is fresh", func() bool {
		dst = t.TempDir()
		c = filetree.NewCopy(dst, src)
		must(t, os.WriteFile(fresh, []byte("fresh"), 0o600))
		must(t, c.PreCopy(t.Context()))
		var st unix.Stat_t
		must(t, unix.Lstat(fresh, &st))
		return !c.Settled(st.Ctim)
	})
	// The copies are spoilt: what is copied again is right again.
	must(t, os.WriteFile(filepath.Join(dst, "d1", "f9"), bytes.Repeat([]byte{'?'}, 300_000), 0o600))
	must(t, os.WriteFile(filepath.Join(dst, "d0", "fresh"), []byte("spoil"), 0o600))
	must(t, c.FinalCopy(t.Context()))
	if b, err := os.ReadFile(filepath.Join(dst, "d1", "f9")); err != nil || !strings.HasPrefix(string(b), "??") {
		t.Errorf("what had not changed was copied again: %v", err)
	}
	if b, err := os.ReadFile(filepath.Join(dst, "d0", "fresh")); err != nil || string(b) != "fresh" {
		t.Errorf("what was new when it was copied ahead was relied on: %q, %v", b, err)
	}
}

// Little is copied once.
func TestCopyOfLittle(t *testing.T) {
	root(t)
	src, dst := t.TempDir(), t.TempDir()
	must(t, os.WriteFile(filepath.Join(src, "one"), []byte("one"), 0o600))
	c := filetree.NewCopy(dst, src)
	must(t, c.PreCopy(t.Context()))
	if left, err := os.ReadDir(dst); err != nil || len(left) > 0 {
		t.Errorf("copied ahead: %v, %v", left, err)
	}
	must(t, c.FinalCopy(t.Context()))
	filetreetest.Same(t, "the copy", filetreetest.Describe(t, dst), filetreetest.Describe(t, src))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
