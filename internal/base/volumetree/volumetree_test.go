package volumetree_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
)

// open returns a volume, its directory, and a directory beside it that nothing may touch.
func open(t *testing.T) (tree *volumetree.Tree, dir, outside string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: files get owners")
	}
	top := t.TempDir()
	dir, outside = filepath.Join(top, "data"), filepath.Join(top, "outside")
	for _, d := range []string{dir, outside, filepath.Join(top, "uploads")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(outside, "secret"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	tree, err := volumetree.Open(dir, filepath.Join(top, "uploads"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = tree.Close()
		if b, err := os.ReadFile(filepath.Join(outside, "secret")); string(b) != "secret" || err != nil {
			t.Errorf("the file outside has %q, %v", b, err)
		}
		if st, err := os.Stat(filepath.Join(outside, "secret")); err != nil || st.Mode() != 0o600 || st.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Errorf("the file outside: %v, %v", st, err)
		}
		if left, err := os.ReadDir(outside); len(left) != 1 || err != nil {
			t.Errorf("outside: %v, %v", left, err)
		}
		if left, err := os.ReadDir(filepath.Join(top, "uploads")); len(left) != 0 || err != nil {
			t.Errorf("uploads: %v, %v", left, err)
		}
	})
	return tree, dir, outside
}

func write(tree *volumetree.Tree, name, text string) error {
	_, _, err := tree.Write(name, strings.NewReader(text), true, volumetree.Attributes{})
	return err
}

// Each operation on a path that leads out is refused, whichever element is the link.
func TestLinksOut(t *testing.T) {
	tree, dir, outside := open(t)
	for name, target := range map[string]string{
		"abs": filepath.Join(outside, "secret"), "rel": "../outside/secret", "dir": outside, "reldir": "../outside", "up": "..", "proc": "/proc/self/root",
	} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	mode, uid := uint32(0o777), uint32(1)
	operations := map[string]func(string) error{
		"read": func(p string) error {
			f, _, err := tree.Read(p)
			if err == nil {
				_ = f.Close()
			}
			return err
		},
		"mode":  func(p string) error { _, err := tree.SetAttributes(p, volumetree.Attributes{Mode: &mode}); return err },
		"owner": func(p string) error { _, err := tree.SetAttributes(p, volumetree.Attributes{UID: &uid}); return err },
		"list":  func(p string) error { _, err := tree.List(t.Context(), p, 1); return err },
	}
	below := map[string]func(string) error{
		"write":  func(p string) error { return write(tree, p, "x") },
		"mkdir":  func(p string) error { _, _, err := tree.MakeDir(p, true, volumetree.Attributes{}); return err },
		"remove": func(p string) error { return tree.Remove(t.Context(), p) },
		"stat":   func(p string) error { _, err := tree.Stat(p); return err },
	}
	for what, do := range operations {
		for _, p := range []string{"abs", "rel", "dir", "reldir", "up", "proc"} {
			if err := do(p); !errors.Is(err, errs.ErrInvalid) {
				t.Errorf("%s %s: %v", what, p, err)
			}
		}
		below[what] = do
	}
	for what, do := range below {
		for _, p := range []string{"dir/secret", "reldir/secret", "up/outside/secret", "up/data/../outside/secret/", "proc/etc/passwd"} {
			if err := do(p); !errors.Is(err, errs.ErrInvalid) && !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("%s %s: %v", what, p, err)
			}
		}
	}
	if err := write(tree, "rel", "mine"); err != nil { // replaces the link
		t.Error(err)
	}
	for _, p := range []string{"abs", "dir", "up"} { // removes the link
		if err := tree.Remove(t.Context(), p); err != nil {
			t.Errorf("remove %s: %v", p, err)
		}
	}
}

// A guest that swaps a directory for a link while the server works leads nothing out.
func TestSwaps(t *testing.T) {
	tree, dir, outside := open(t)
	own, link := filepath.Join(dir, "real"), filepath.Join(dir, "link")
	if err := errors.Join(os.MkdirAll(own, 0o777), os.Symlink(outside, link)); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var guest sync.WaitGroup
	guest.Go(func() {
		for ctx.Err() == nil {
			_ = unix.Renameat2(unix.AT_FDCWD, own, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE)
		}
	})
	mode := uint32(0o777)
	for range 300 {
		_ = write(tree, "real/secret", "overwritten")
		_, _ = tree.SetAttributes("real/secret", volumetree.Attributes{Mode: &mode})
		if f, _, err := tree.Read("real/secret"); err == nil {
			if b, _ := io.ReadAll(f); string(b) == "secret" {
				t.Error("read what is outside")
			}
			_ = f.Close()
		}
		_, _ = tree.List(ctx, "/", 3)
		_ = tree.Remove(ctx, "real/secret")
		_, _, _ = tree.MakeDir("real/d/e", true, volumetree.Attributes{})
		_ = tree.Remove(ctx, "real/d")
	}
	stop()
	guest.Wait()
}

// Pipes, sockets and devices are shown and removed, but never opened.
func TestSpecialFiles(t *testing.T) {
	tree, dir, _ := open(t)
	if err := errors.Join(unix.Mkfifo(filepath.Join(dir, "pipe"), 0o666), unix.Mknod(filepath.Join(dir, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	for _, name := range []string{"pipe", "null"} {
		if e, err := tree.Stat(name); err != nil || e.Type != volumetree.Unknown {
			t.Errorf("stat %s: %+v, %v", name, e, err)
		}
		if _, _, err := tree.Read(name); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("read %s: %v", name, err)
		}
		if _, err := tree.List(t.Context(), name, 1); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("list %s: %v", name, err)
		}
		if err := write(tree, name, "a file"); err != nil {
			t.Errorf("write %s: %v", name, err)
		}
		if e, err := tree.Stat(name); err != nil || e.Type != volumetree.File {
			t.Errorf("stat %s: %+v, %v", name, e, err)
		}
	}
}

// deepen makes a chain of directories that no path can name.
func deepen(t *testing.T, dir string, depth int) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.Repeat("d", 255)
	for range depth {
		err := unix.Mkdirat(at, name, 0o777)
		next := -1
		if err == nil {
			next, err = unix.Openat(at, name, unix.O_DIRECTORY, 0)
		}
		_ = unix.Close(at)
		if err != nil {
			t.Fatal(err)
		}
		at = next
	}
	_ = unix.Close(at)
}

// Depth takes neither memory nor descriptors; a removal always ends, and a measurement says that it is not whole.
func TestDepth(t *testing.T) {
	tree, dir, _ := open(t)
	deepen(t, dir, 1000)
	u, err := tree.Measure(t.Context())
	if err != nil || !u.Partial || u.Files == 0 {
		t.Errorf("measured %+v, %v", u, err)
	}
	if list, err := tree.List(t.Context(), "/", volumetree.MaxListDepth); err != nil || len(list) != volumetree.MaxListDepth {
		t.Errorf("%d entries, %v", len(list), err)
	}
	if err := tree.Remove(t.Context(), strings.Repeat("d", 255)); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); len(left) != 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
	if u, err := tree.Measure(t.Context()); err != nil || u != (volumetree.Usage{}) {
		t.Errorf("measured %+v, %v", u, err)
	}
}

func TestLimits(t *testing.T) {
	tree, dir, _ := open(t)
	for i := range volumetree.MaxListEntries + 1 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := tree.List(t.Context(), "/", 1); !errors.Is(err, errs.ErrTooLarge) {
		t.Errorf("too many entries: %v", err)
	}
	for name, p := range map[string]string{
		"deep": strings.Repeat("a/", 129), "long": strings.Repeat("a", 256), "path": strings.Repeat("a/", 3000), "zero": "a\x00b",
	} {
		if err := write(tree, p, ""); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	wrong := uint32(0o4755)
	if _, _, err := tree.Write("setuid", strings.NewReader(""), true, volumetree.Attributes{Mode: &wrong}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("setuid: %v", err)
	}
}

// A body that fails leaves what was there.
func TestFailedWrite(t *testing.T) {
	tree, _, _ := open(t)
	if err := write(tree, "f", "before"); err != nil {
		t.Fatal(err)
	}
	failing := io.MultiReader(strings.NewReader("half"), iotestErr{})
	if _, _, err := tree.Write("f", failing, true, volumetree.Attributes{}); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("err = %v", err)
	}
	f, _, err := tree.Read("f")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if b, err := io.ReadAll(f); string(b) != "before" || err != nil {
		t.Errorf("the file has %q, %v", b, err)
	}
}

type iotestErr struct{}

func (iotestErr) Read([]byte) (int, error) { return 0, fmt.Errorf("no more: %w", errs.ErrExhausted) }

// A file with two names counts once.
func TestMeasure(t *testing.T) {
	tree, dir, _ := open(t)
	if err := errors.Join(write(tree, "a", strings.Repeat("x", 1<<20)), os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "b")), os.Truncate(filepath.Join(dir, "a"), 1<<30)); err != nil {
		t.Fatal(err)
	}
	if u, err := tree.Measure(t.Context()); err != nil || u.Files != 2 || u.Bytes < 1<<20 || u.Bytes > 2<<20 {
		t.Errorf("measured %+v, %v", u, err)
	}
}
