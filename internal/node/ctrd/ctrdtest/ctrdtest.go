// Package ctrdtest runs containerd for tests.
package ctrdtest

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/node/ctrd/supervisor"
)

// patience bounds the wait for containerd; only a fault uses it up.
const patience = 2 * time.Minute

// Program is the path of containerd. It skips the test without root or without the program.
func Program(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for containerd's mounts")
	}
	cache := os.Getenv("BARCHAN_CACHE")
	if cache == "" {
		cache = "/var/cache/barchan"
	}
	path := filepath.Join(cache, "bin", "containerd")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	path, err := exec.LookPath("containerd")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("containerd is missing: %v", err)
		}
		t.Skipf("SKIPPED: containerd is missing: %v", err)
	}
	return path
}

// Dir is a new directory with a path short enough for sockets.
func Dir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "bc-") //nolint:usetesting // short, for sockets
	must(t, err)
	t.Cleanup(func() {
		must(t, os.RemoveAll(dir))
	})
	return filepath.Join(dir, "c")
}

// Daemon is a supervisor with its Run.
type Daemon struct {
	*supervisor.Supervisor
	// Leave ends Run and not containerd.
	Leave func()

	dir     string
	answers chan struct{} // one for each time that containerd is ready
}

// Start runs a supervisor of a directory until Leave, or the end of the test.
func Start(t *testing.T, dir string) *Daemon {
	t.Helper()
	s, err := supervisor.New(supervisor.Config{Binary: Program(t), Dir: dir, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	d := &Daemon{Supervisor: s, dir: dir, answers: make(chan struct{}, 16)}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, func() { d.answers <- struct{}{} }) }() // received in Leave
	d.Leave = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(d.Leave)
	d.Await(t)
	return d
}

// Await returns when containerd is ready once more.
func (d *Daemon) Await(t *testing.T) {
	t.Helper()
	select {
	case <-d.answers:
	case <-time.After(patience):
		t.Fatal("containerd does not answer")
	}
}

// Process is the process in containerd's pid file.
func (d *Daemon) Process(t *testing.T) (p lifecycle.Process) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(d.dir, "containerd.pid"))
	must(t, err)
	must(t, json.Unmarshal(b, &p))
	return p
}

// End ends Run and containerd.
func (d *Daemon) End(t *testing.T) {
	t.Helper()
	d.Leave()
	must(t, d.Stop(context.WithoutCancel(t.Context())))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
