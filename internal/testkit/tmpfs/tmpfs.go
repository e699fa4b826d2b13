// Package tmpfs mounts small file systems for tests of full disks.
package tmpfs

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Mount mounts a file system of a size, such as "64m", until the test ends. Without root it skips the test.
func Mount(t testing.TB, size string) (dir string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	dir = t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}
