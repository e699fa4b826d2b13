package ctrd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"
)

// TestOverKeepsInodes links a file of the image. Both names are one file, with the number that it had before, also where the writes
// are on another file system.
func TestOverKeepsInodes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounts need root")
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"image", "own", "work", "other", "root"} {
		if err := os.Mkdir(at(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mounted := func(source, target, kind string) {
		t.Helper()
		if err := unix.Mount(source, target, kind, 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(target, 0); err != nil {
				t.Error(err)
			}
		})
	}
	mounted("tmpfs", at("other"), "tmpfs")
	if err := os.WriteFile(at("image/file"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	r, err := Rootfs{Key: "k", mounts: []mount.Mount{{Type: overlayType, Source: "overlay", Options: []string{"lowerdir=" + at("image"), upperOption + at("own"), "workdir=" + at("work")}}}}.Over(at("other"))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Mount(at("root"), false); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(at("root"), 0); err != nil {
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
