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

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/apiserver/etcd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/tmpfs"
)

func writeZeros(t *testing.T, path string, size int) {
	t.Helper()
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
}

// serverOn makes a server whose data directory is on a disk.
func serverOn(t *testing.T, disk string, reexec bool) *Daemon {
	t.Helper()
	cfg := config.Default()
	cfg.DataDir, cfg.RunDir, cfg.NodeName = filepath.Join(disk, "d"), filepath.Join(disk, "d", "run"), "n"
	cfg.HTTPAddr, cfg.TLSAddr, cfg.KubeAddr, cfg.SSHAddr, cfg.MetricsAddr = "127.0.0.1:0", "", "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	d, err := New(Config{Config: cfg, Log: telemetry.Discard(), AfterReexec: reexec})
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

// A server on a faulty disk fails at once; after a reexec it waits and reports the fault.
func TestAwaitDisk(t *testing.T) {
	disk := tmpfs.Mount(t, "256m")
	writeZeros(t, filepath.Join(disk, "big"), 200<<20)
	if err := serverOn(t, disk, false).Run(t.Context()); !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), `"disk"`) || !strings.Contains(err.Error(), "MiB are needed") {
		t.Errorf("Run on a full disk = %v", err)
	}
	d := serverOn(t, disk, true)
	done := make(chan error, 1)
	go func() { done <- d.progress.Do(t.Context(), "disk", d.awaitDisk) }()
	eventually.True(t, "the fault is reported", func() bool { return d.health.Err() != nil })
	if status, text := post(t, "http://"+d.plain.Addr().String()+"/sandboxes"); status != http.StatusServiceUnavailable ||
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
		t.Errorf("the fault is still reported: %v", err)
	}
}

func TestReadOnlyDisk(t *testing.T) {
	disk := tmpfs.Mount(t, "256m")
	d := serverOn(t, disk, false)
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
		t.Error("the first boot on a full disk does not end")
	}
	if err := d.lost(t.Context(), fmt.Errorf("x: %w", etcd.ErrStorage)); !errors.Is(err, ErrReexec) {
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
		t.Error("a server restarts in place after a stop request")
	}
}
