package supervisor_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/ctrdtest"
	"github.com/barchan-dev/barchan/internal/node/ctrd/supervisor"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func process(t *testing.T, d *ctrdtest.Daemon) lifecycle.Process {
	t.Helper()
	p, ok := d.Find(t.Context())
	if !ok {
		t.Fatal("containerd does not run")
	}
	return p
}

func TestSupervisorLeavesAdoptsRestartsAndStops(t *testing.T) {
	dir := ctrdtest.Dir(t)
	d := ctrdtest.Start(t, dir)
	first := process(t, d)
	d.Leave()
	if !first.Alive() {
		t.Fatal("containerd ended with its supervisor")
	}
	d = ctrdtest.Start(t, dir)
	if p := process(t, d); p != first {
		t.Errorf("adopted %+v, want %+v", p, first)
	}
	d.Leave()
	// As after a crash before the pid file was written: the socket leads to the process.
	must(t, os.Remove(filepath.Join(dir, "containerd.pid")))
	d = ctrdtest.Start(t, dir)
	if p := process(t, d); p != first {
		t.Errorf("adopted %+v, want %+v", p, first)
	}
	must(t, first.Signal(9))
	d.Await(t)
	second := process(t, d)
	if second == first || !second.Alive() {
		t.Errorf("after its death %+v, before %+v", second, first)
	}
	c, err := ctrd.NewClient(ctrd.Config{Address: d.Address(), CallTimeout: eventually.Patience})
	must(t, err)
	defer func() { _ = c.Close() }()
	must(t, c.Check(t.Context()))
	d.Leave()
	for range 2 {
		must(t, d.Stop(t.Context()))
	}
	if second.Alive() {
		t.Error("containerd outlived Stop")
	}
}

func TestNewRefuses(t *testing.T) {
	program := ctrdtest.Program(t)
	log := slog.New(slog.DiscardHandler)
	for name, cfg := range map[string]supervisor.Config{
		"no directory":       {Binary: program, Log: log},
		"relative directory": {Binary: program, Dir: "x", Log: log},
		"long directory":     {Binary: program, Dir: "/" + strings.Repeat("x", 100), Log: log},
		"no program":         {Binary: "/none", Dir: "/tmp/x", Log: log},
		"no logger":          {Binary: program, Dir: "/tmp/x"},
	} {
		if _, err := supervisor.New(cfg); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
