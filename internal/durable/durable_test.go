package durable

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/barchan-dev/barchan/internal/errs"
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
