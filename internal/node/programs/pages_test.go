package programs

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
)

// A fresh copy of a program, which is cached in small pages, is cached in large ones after it, with the same content.
func TestReadInLargePages(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	want := make([]byte, 4<<20)
	_, _ = rand.Read(want)
	if err := durable.CopyProgram(bytes.NewReader(want), path); err != nil {
		t.Fatal(err)
	}
	if err := readInLargePages(path); err != nil {
		t.Skip("this kernel has no large pages: ", err)
	}
	before := largePages(t, path)
	if err := errors.Join(evict(path), readInLargePages(path)); err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the program has changed, %v", err)
	}
	after := largePages(t, path)
	if before == 0 && after == 0 {
		t.Skip("this file system caches no large pages")
	}
	if after != len(want) {
		t.Errorf("%d bytes are in large pages, %d before, want %d", after, before, len(want))
	}
	if err := readInLargePages(path); err != nil {
		t.Error(err)
	}
	if err := readInLargePages(path + "-absent"); err == nil {
		t.Error("an absent program is read")
	}
}

// largePages returns how many bytes of a file the kernel maps in pages of 2 MiB.
func largePages(t *testing.T, path string) int {
	t.Helper()
	pages, err := mapInLargePages(path) // aligned, as it is large
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(pages) }()
	smaps, err := os.Open("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = smaps.Close() }()
	found := false
	for lines := bufio.NewScanner(smaps); lines.Scan(); {
		found = found || strings.HasSuffix(lines.Text(), path)
		if size, ok := strings.CutPrefix(lines.Text(), "FilePmdMapped:"); ok && found {
			kib, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(size, "kB")))
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("smaps has no such mapping")
	return 0
}
