// Package fuzztar has what the fuzz tests of readers of tars share: tars from generated text, and a directory in memory that shows
// what a reader writes beside it. It reads no tar.
package fuzztar

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// maxEntries keeps inputs quick.
const maxEntries = 6

// Make makes a tar of lines with a type, a name and a link or content: random bytes have no header's checksum. Lines beyond the sixth
// are not in it.
func Make(text string) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	lines := strings.Split(text, "\n")
	for _, line := range lines[:min(len(lines), maxEntries)] {
		parts := strings.SplitN(line, " ", 3)
		if len(parts) < 3 || len(parts[0]) != 1 {
			continue
		}
		h := tar.Header{Typeflag: parts[0][0], Name: parts[1], Linkname: parts[2], Mode: 0o700}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(parts[2]))
		}
		if w.WriteHeader(&h) == nil {
			_, _ = w.Write([]byte(parts[2])[:h.Size])
		}
	}
	_ = w.Close()
	return b.Bytes()
}

// Dir is a directory that millions of inputs use, one after the other.
type Dir struct{ above, dir string }

// NewDir makes one, until the test ends.
func NewDir(f *testing.F) *Dir {
	f.Helper()
	above, err := os.MkdirTemp("/dev/shm", "fuzz-") // in memory
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = os.RemoveAll(above) })
	d := &Dir{above: above, dir: filepath.Join(above, "dir")}
	if err := os.Mkdir(d.dir, 0o700); err != nil {
		f.Fatal(err)
	}
	return d
}

// Read gives the empty directory to a reader, and fails the test if that writes beside it. What the reader has written, if it has, is
// shown to check, and removed.
func (d *Dir) Read(t *testing.T, read, check func(dir string)) {
	t.Helper()
	read(d.dir)
	if all, err := os.ReadDir(d.above); err != nil || len(all) != 1 {
		t.Fatalf("beside the directory: %v, %v", all, err)
	}
	if all, err := os.ReadDir(d.dir); err == nil && len(all) == 0 {
		return
	}
	check(d.dir)
	if err := os.RemoveAll(d.dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(d.dir, 0o700); err != nil {
		t.Fatal(err)
	}
}
