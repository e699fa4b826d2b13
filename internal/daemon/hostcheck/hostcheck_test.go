package hostcheck

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/testkit/tmpfs"
)

func TestWatermark(t *testing.T) {
	w := &watermark{least: 100, capped: true}
	for i, step := range []struct {
		free, total int64
		want        bool
	}{
		{100, 10_000, false},
		{99, 10_000, true},
		{100, 10_000, true}, // a little more is not enough again
		{124, 10_000, true},
		{125, 10_000, false},
		{100, 10_000, false},
		{50, 1000, false}, // of little, a part is kept
		{49, 1000, true},
	} {
		if got := w.low(step.free, step.total); got != step.want {
			t.Errorf("step %d: low(%d, %d) = %v", i, step.free, step.total, got)
		}
	}
	if !(&watermark{least: 100}).low(99, 1000) {
		t.Error("an explicit setting is not used")
	}
	if (&watermark{}).low(0, 1000) {
		t.Error("what is not looked at is too little")
	}
}

func TestParseMemory(t *testing.T) {
	free, total, err := parseMemory("MemTotal:  2048 kB\nMemFree:  1 kB\nMemAvailable:    1024 kB\n")
	if free != 1<<20 || total != 2<<20 || err != nil {
		t.Errorf("parseMemory = %d, %d, %v", free, total, err)
	}
	for _, text := range []string{"", "MemTotal: x kB\n"} {
		if _, _, err := parseMemory(text); err == nil {
			t.Errorf("parseMemory(%q) has no error", text)
		}
	}
	if _, _, err := ReadMemory(); err != nil {
		t.Error(err)
	}
}

func TestSyncFailed(t *testing.T) {
	for err, want := range map[error]bool{
		fmt.Errorf("write journal: %w", unix.EIO):                                                 true,
		fmt.Errorf("write journal: %w", &os.PathError{Op: "sync", Path: "/x", Err: unix.ENOSPC}):  true,
		fmt.Errorf("write journal: %w", &os.PathError{Op: "write", Path: "/x", Err: unix.ENOSPC}): false,
		errors.New("encode journal"):                                                              false,
	} {
		if SyncFailed(err) != want {
			t.Errorf("SyncFailed(%v) = %v", err, !want)
		}
	}
}

func writeZeros(t *testing.T, path string, size int) {
	t.Helper()
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestCheckDisks(t *testing.T) {
	dir := tmpfs.Mount(t, "64m")
	bytes, inodes := &watermark{least: 1 << 30, capped: true}, &watermark{least: leastInodes, capped: true}
	look := func() error { return checkDisks([]string{filepath.Join(dir, "none"), dir}, bytes, inodes) }
	if err := look(); err != nil {
		t.Fatalf("an empty disk: %v", err)
	}
	big := filepath.Join(dir, "big")
	writeZeros(t, big, 62<<20)
	err := look()
	if text, _ := errs.PublicMessage(err); text != "2 MiB are free, and 3 MiB are kept for what runs" || !strings.Contains(err.Error(), dir) {
		t.Errorf("a full disk: %v (public %q)", err, text)
	}
	if err := os.Remove(big); err != nil {
		t.Fatal(err)
	}
	if err := look(); err != nil {
		t.Errorf("a disk with room again: %v", err)
	}
	few := tmpfs.Mount(t, "64m,nr_inodes=100")
	for i := range 97 {
		writeZeros(t, filepath.Join(few, fmt.Sprint(i)), 0)
	}
	err = checkDisks([]string{few}, bytes, inodes)
	if text, _ := errs.PublicMessage(err); !strings.Contains(text, "inodes are free") {
		t.Errorf("a disk without inodes: %v", err)
	}
}

func TestReserveIsGivenUp(t *testing.T) {
	dir := tmpfs.Mount(t, "320m")
	path := filepath.Join(dir, reserveFile)
	size := func() int64 {
		if err := keepReserve(dir); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			return 0
		}
		return info.Size()
	}
	if got := size(); got != 20<<20 {
		t.Fatalf("the reserve has %d bytes, want 20 MiB", got)
	}
	writeZeros(t, filepath.Join(dir, "some"), 200<<20)
	if size() == 0 {
		t.Error("given up too early")
	}
	writeZeros(t, filepath.Join(dir, "more"), 97<<20)
	if size() != 0 {
		t.Error("not given up")
	}
	if size() != 0 {
		t.Error("taken again where there is no room")
	}
}

// What would take from that which is kept is not written.
func TestCheckSpace(t *testing.T) {
	dir := tmpfs.Mount(t, "64m")
	cfg := config.Default()
	cfg.ReserveDisk = resource.MustParse("16Mi")
	may := CheckSpace(&cfg)
	if err := may(dir, 40<<20); err != nil {
		t.Errorf("40 of 64 MiB: %v", err)
	}
	deep := filepath.Join(dir, "not", "there")
	err := may(deep, 50<<20)
	if text, _ := errs.PublicMessage(err); !errors.Is(err, errs.ErrExhausted) || !strings.HasPrefix(text, "it may need 50 MiB of disk space; 6") || !strings.HasSuffix(text, "and 16 MiB are kept for what runs") {
		t.Errorf("50 of 64 MiB: %v (public %q)", err, text)
	}
	cfg.ReserveDisk = resource.Quantity{}
	if err := CheckSpace(&cfg)(dir, 1<<40); err != nil {
		t.Errorf("without a reserve: %v", err)
	}
}
