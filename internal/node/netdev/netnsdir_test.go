package netdev

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// ip(8)'s preparation must not cover existing namespaces.
func TestShareDir(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	dir := filepath.Join(t.TempDir(), "netns")
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	for range 2 {
		if err := shareDir(dir); err != nil {
			t.Fatal(err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(mounts), " "+dir+" "); n != 1 {
		t.Errorf("%s is mounted %d times, want once", dir, n)
	}
	ns := filepath.Join(dir, "one")
	if err := placeholder(ns); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("/proc/self/ns/net", ns, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	// As ip(8): a directory that is a mount is not mounted again.
	if err := unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		t.Errorf("not a shared mount: %v", err)
	}
	if err := unix.Unmount(ns, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(ns); err != nil {
		t.Errorf("the namespace's file cannot be removed: %v", err)
	}
}
