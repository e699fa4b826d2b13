package durable

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestUsage(t *testing.T) {
	dir := t.TempDir()
	sub := filepath.Join(dir, "a", "b")
	if err := os.MkdirAll(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(sub, "f")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	once := usage(t, dir)
	if once < 1<<20 || once > 1<<20+64<<10 {
		t.Errorf("usage of a mebibyte is %d", once)
	}
	if err := errors.Join(os.Link(file, filepath.Join(dir, "again")), os.Symlink("/", filepath.Join(dir, "root"))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "sparse"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, "sparse"), 1<<40); err != nil {
		t.Fatal(err)
	}
	if with := usage(t, dir); with != once {
		t.Errorf("usage with a second name, a link and a hole is %d, without %d", with, once)
	}
	if _, err := Usage(t.Context(), filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("usage of nothing: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Usage(ended, dir); !errors.Is(err, context.Canceled) {
		t.Errorf("usage after the end of its context: %v", err)
	}
}

func usage(t *testing.T, dir string) int64 {
	t.Helper()
	n, err := Usage(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A tree that no path reaches the end of is measured whole.
func TestUsageOfADeepTree(t *testing.T) {
	dir, name := t.TempDir(), strings.Repeat("d", 255)
	at, err := os.Open(dir)
	for range 4000 {
		if err == nil {
			err = unix.Mkdirat(int(at.Fd()), name, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
		var below *os.File
		if below, err = openIn(at, name); err == nil {
			err, at = at.Close(), below
		}
	}
	fd, err := unix.Openat(int(at.Fd()), "f", unix.O_CREAT|unix.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "f")
	_, err = f.Write(make([]byte, 64<<20))
	if err = errors.Join(err, f.Close(), at.Close()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "z"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := usage(t, dir); n < 65<<20 {
		t.Errorf("usage is %d, its end has 64 MiB and its beginning one", n)
	}
}
