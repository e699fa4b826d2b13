package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
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
		t.Error("what somebody has set is not kept")
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
	if _, _, err := readMemory(); err != nil {
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
		if syncFailed(err) != want {
			t.Errorf("syncFailed(%v) = %v", err, !want)
		}
	}
}

// mount mounts a small filesystem.
func mount(t *testing.T, size string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	dir := t.TempDir()
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

func writeZeros(t *testing.T, path string, size int) {
	t.Helper()
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestLookAtDisks(t *testing.T) {
	dir := mount(t, "64m")
	bytes, inodes := &watermark{least: 1 << 30, capped: true}, &watermark{least: leastInodes, capped: true}
	look := func() error { return lookAtDisks([]string{filepath.Join(dir, "none"), dir}, bytes, inodes) }
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
	few := mount(t, "64m,nr_inodes=100")
	for i := range 97 {
		writeZeros(t, filepath.Join(few, fmt.Sprint(i)), 0)
	}
	err = lookAtDisks([]string{few}, bytes, inodes)
	if text, _ := errs.PublicMessage(err); !strings.Contains(text, "inodes are free") {
		t.Errorf("a disk without inodes: %v", err)
	}
}

func TestReserveIsGivenUp(t *testing.T) {
	dir := mount(t, "320m")
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

// roomOn makes a server whose data directory is on a disk.
func roomOn(t *testing.T, disk string, anew bool) *Daemon {
	t.Helper()
	cfg := config.Default()
	cfg.DataDir, cfg.RunDir, cfg.NodeName = filepath.Join(disk, "d"), filepath.Join(disk, "d", "run"), "n"
	cfg.HTTPAddr, cfg.TLSAddr, cfg.KubeAddr = "127.0.0.1:0", "", "127.0.0.1:0"
	d, err := New(Config{Config: cfg, Log: telemetry.Discard(), AfterReexec: anew})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func post(t *testing.T, url string) (status int, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// A server over a disk that is not well says so at once; one that begins anew waits, and tells
// everybody why.
func TestAwaitDisk(t *testing.T) {
	disk := mount(t, "256m")
	writeZeros(t, filepath.Join(disk, "big"), 200<<20)
	if err := roomOn(t, disk, false).Run(t.Context()); !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), `"disk"`) || !strings.Contains(err.Error(), "MiB are needed") {
		t.Errorf("Run on a full disk = %v", err)
	}
	d := roomOn(t, disk, true)
	done := make(chan error, 1)
	go func() { done <- d.progress.Do(t.Context(), "disk", d.awaitDisk) }()
	eventually.True(t, "something is told to be wrong", func() bool { return d.health.Err() != nil })
	if status, text := post(t, "http://"+d.plain.listener.Addr().String()+"/sandboxes"); status != http.StatusServiceUnavailable ||
		!strings.Contains(text, "(disk)") || !strings.Contains(text, "MiB are needed") {
		t.Errorf("meanwhile: %d %s", status, text)
	}
	if err := os.Remove(filepath.Join(disk, "big")); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("with room again: %v", err)
	}
	if err := d.health.Err(); err != nil {
		t.Errorf("it is still told to be wrong: %v", err)
	}
}

func TestReadOnlyRoom(t *testing.T) {
	disk := mount(t, "256m")
	d := roomOn(t, disk, false)
	if err := unix.Mount("", disk, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if err := d.Run(t.Context()); !errors.Is(err, unix.EROFS) {
		t.Errorf("Run on a read-only disk = %v", err)
	}
}

func TestLost(t *testing.T) {
	d := &Daemon{log: telemetry.Discard()}
	full := fmt.Errorf("x: %w", unix.ENOSPC)
	if err := d.lost(t.Context(), full); errors.Is(err, ErrReexec) {
		t.Error("the first boot on a full disk goes on for ever")
	}
	if err := d.lost(t.Context(), fmt.Errorf("x: %w", apiserver.ErrStorage)); !errors.Is(err, ErrReexec) {
		t.Errorf("after storage failed: %v", err)
	}
	d.cfg.AfterReexec = true
	if err := d.lost(t.Context(), full); !errors.Is(err, ErrReexec) {
		t.Errorf("a boot after that: %v", err)
	}
	if err := d.lost(t.Context(), errors.New("else")); errors.Is(err, ErrReexec) {
		t.Errorf("what the disk has nothing to do with: %v", err)
	}
	stopped, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.lost(stopped, full); errors.Is(err, ErrReexec) {
		t.Error("a server that was asked to stop begins anew")
	}
}

// What would take from that which is kept is not written.
func TestRoom(t *testing.T) {
	dir := mount(t, "64m")
	cfg := config.Default()
	cfg.ReserveDisk = resource.MustParse("16Mi")
	may := room(&cfg)
	if err := may(dir, 40<<20); err != nil {
		t.Errorf("40 of 64 MiB: %v", err)
	}
	deep := filepath.Join(dir, "not", "there")
	err := may(deep, 50<<20)
	if text, _ := errs.PublicMessage(err); !errors.Is(err, errs.ErrExhausted) || !strings.HasPrefix(text, "it may need 50 MiB of disk space; 6") || !strings.HasSuffix(text, "and 16 MiB are kept for what runs") {
		t.Errorf("50 of 64 MiB: %v (public %q)", err, text)
	}
	cfg.ReserveDisk = resource.Quantity{}
	if room(&cfg) != nil {
		t.Error("nothing is kept, and room is asked for")
	}
}
