package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, content := range []string{"one", "two"} {
		if err := WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != content {
			t.Errorf("read %q, %v, want %q", got, err, content)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info, err)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
		t.Errorf("left in the directory: %v, %v", list, err)
	}
}

func TestWriteFileThatFailsLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil { // a directory cannot be replaced by a file
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("x"), 0o600); err == nil {
		t.Fatal("WriteFile replaced a directory")
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
		t.Errorf("left in the directory: %v, %v", list, err)
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	release, _, err := Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, holder, err := Lock(path); !errors.Is(err, errs.ErrConflict) || holder != strconv.Itoa(os.Getpid()) {
		t.Errorf("second Lock: holder %q, %v", holder, err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	release, _, err = Lock(path)
	if err != nil {
		t.Fatalf("after release: %v", err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
}

func TestCheckWrites(t *testing.T) {
	dir := t.TempDir()
	if err := CheckWrites(dir); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if err := CheckWrites(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("CheckWrites of no directory = %v", err)
	}
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_RDONLY, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	if err := CheckWrites(dir); !errors.Is(err, unix.EROFS) {
		t.Errorf("CheckWrites on what is read-only = %v", err)
	}
}

func TestReserve(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	path := filepath.Join(dir, "reserve")
	for range 2 {
		if err := Reserve(path, 768<<10); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "big"), make([]byte, 512<<10), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("the room is not taken: %v", err)
	}
	if err := Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := Reserve(path, 2<<20); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("Reserve of more than there is = %v", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a failed reserve left %v", err)
	}
}
