package plainfile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestContent(t *testing.T) {
	for name, content := range map[string]string{"empty": "", "short": "root:x:0:0::/root:/bin/sh\n", "long": strings.Repeat("0123456789abcdef", 1<<14)} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(f)
		if err != nil || string(got) != content {
			t.Errorf("%s: %d bytes, %v, want %d", name, len(got), err, len(content))
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		if whole, err := ReadFile(path); err != nil || string(whole) != content {
			t.Errorf("%s: ReadFile = %d bytes, %v, want %d", name, len(whole), err, len(content))
		}
	}
}

// TestErrors: they are those of package os.
func TestErrors(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "short"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for what, path := range map[string]string{"missing": filepath.Join(dir, "none"), "below a file": filepath.Join(dir, "short", "x"), "directory": dir} {
		read := func(open func() (io.ReadCloser, error)) error {
			f, err := open()
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }()
			_, err = io.ReadAll(f)
			return err
		}
		got := read(func() (io.ReadCloser, error) { return Open(path) })
		if _, err := ReadFile(path); err == nil || err.Error() != got.Error() {
			t.Errorf("%s: ReadFile = %v, want %v", what, err, got)
		}
		want := read(func() (io.ReadCloser, error) { return os.Open(path) })
		if got == nil || want == nil || got.Error() != want.Error() || errors.Is(got, os.ErrNotExist) != errors.Is(want, os.ErrNotExist) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
}

// TestNothingWaits: a pipe in the place of a file holds nothing up.
func TestNothingWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(f); err != nil || len(b) > 0 {
		t.Errorf("without a writer: %q, %v", b, err)
	}
	writer, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(f); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("with a silent writer: %v", err)
	}
	_, _ = writer.Close(), f.Close()
	if err := Write(path, []byte("x")); !errors.Is(err, unix.ENXIO) {
		t.Errorf("write without a reader: %v", err)
	}
}

func TestWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := Write(path, []byte("1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("to a missing file: %v", err)
	}
	if err := os.WriteFile(path, []byte("abc"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Write(path, []byte("1")); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "1bc" {
		t.Errorf("%q, %v", b, err)
	}
	if err := Write("/dev/full", []byte("1")); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("to a full device: %v", err)
	}
}
