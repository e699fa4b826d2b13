package volumes_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/volumes"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Issue 14: what sandboxes wrote to a volume was measured, and not bounded.
func TestVolumeIsBounded(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: needs root for mounts")
	}
	dir := t.TempDir()
	disks := disk.Open(filepath.Join(dir, "disks"))
	if err := disks.Fault(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	t.Cleanup(func() { must(t, disk.DiscardBelow(dir)) })
	open := func() *volumes.Store {
		s, err := volumes.Open(filepath.Join(dir, "v"), disks, func(types.NamespacedName) []string { return nil }, nil)
		must(t, err)
		must(t, s.Sweep(t.Context()))
		return s
	}
	s := open()
	const capacity = 32 << 20
	must(t, s.Make(t.Context(), ref, capacity, nil))
	must(t, s.Make(t.Context(), ref, capacity, nil))
	at, err := s.Source(ref.Key())
	must(t, err)
	err = os.WriteFile(filepath.Join(at, "big"), make([]byte, 64<<20), 0o600)
	if info, statErr := os.Stat(filepath.Join(at, "big")); !errors.Is(err, unix.ENOSPC) || statErr != nil || info.Size() > capacity+disk.Slack || info.Size() < capacity*9/10 {
		t.Fatalf("64 MiB into 32: %v, %v", err, info)
	}
	u, err := s.Measure(t.Context(), ref, capacity)
	if err != nil || u.Bytes > capacity || u.Bytes < capacity*9/10 || u.Files != 1 {
		t.Errorf("measured %+v, %v", u, err)
	}
	if err := s.Take(ref, 1<<20, 1); !errors.Is(err, volumetree.ErrFull) {
		t.Errorf("upload into a full one: %v", err)
	}
	mountedAgain(t, dir, open)
}

// mountedAgain has the machine start again: nothing is mounted; uploads of before are removed.
func mountedAgain(t *testing.T, dir string, open func() *volumes.Store) {
	t.Helper()
	at := filepath.Join(dir, "v/team/data/disk/data")
	must(t, os.WriteFile(filepath.Join(dir, "v/team/data/disk/uploads/upload-1"), nil, 0o600))
	must(t, os.Truncate(filepath.Join(at, "big"), 1<<20))
	must(t, disk.Unmount(filepath.Join(dir, "v/team/data/disk")))
	s := open()
	got, err := s.Source(ref.Key())
	if err != nil || got != at {
		t.Fatalf("mount again: %s, %v", got, err)
	}
	if info, err := os.Stat(filepath.Join(at, "big")); err != nil || info.Size() != 1<<20 {
		t.Errorf("its file: %v, %v", info, err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, "v/team/data/disk/uploads")); err != nil || len(left) != 0 {
		t.Errorf("uploads: %v, %v", left, err)
	}
	tree, err := s.Tree(ref)
	must(t, err)
	_, _, err = tree.Write("in", strings.NewReader("text"), false, volumetree.Attributes{})
	must(t, errors.Join(err, tree.Close()))
	must(t, s.Remove(t.Context(), ref))
	if left, err := os.ReadDir(filepath.Join(dir, "v")); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if table, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(table), filepath.Join(dir, "v")) {
		t.Errorf("still mounted: %v", err)
	}
}
