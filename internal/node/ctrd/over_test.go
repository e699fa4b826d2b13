package ctrd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/tmpfs"
)

// TestOverKeepsInodes links a file of the image. Both names are one file, with the number that it had before, also where the writes
// are on another file system.
func TestOverKeepsInodes(t *testing.T) {
	dir, other := t.TempDir(), tmpfs.Mount(t, "1m")
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"image", "own", "work", "root"} {
		if err := os.Mkdir(at(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(at("image/file"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	r, err := Rootfs{Key: "k", mounts: []mount.Mount{{Type: overlayType, Source: "overlay", Options: []string{"lowerdir=" + at("image"), upperOption + at("own"), "workdir=" + at("work")}}}}.Over(other)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Mount(at("root"), false); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := Unmount(at("root")); err != nil {
			t.Error(err)
		}
	}()
	number := func(name string) uint64 {
		t.Helper()
		var s unix.Stat_t
		if err := unix.Stat(at("root/"+name), &s); err != nil {
			t.Fatal(err)
		}
		return s.Ino
	}
	before := number("file")
	if err := os.Link(at("root/file"), at("root/link")); err != nil {
		t.Fatal(err)
	}
	if file, link := number("file"), number("link"); file != before || link != before {
		t.Errorf("the file was %d, is %d, and its link %d", before, file, link)
	}
}
