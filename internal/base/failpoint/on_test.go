//go:build failpoints

package failpoint

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// TestMain is also the process that a point kills.
func TestMain(m *testing.M) {
	if os.Getenv("DIE_AT") != "" {
		for range 3 {
			os.Stdout.WriteString("x")
			Reach("row/live")
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestKills(t *testing.T) {
	for give, want := range map[string]struct {
		out    string
		killed bool
	}{"row/live": {"x", true}, "row/live:3=kill": {"xxx", true}, "row/live:4": {"xxx", false}, "row/gone": {"xxx", false}, "": {"xxx", false}} {
		t.Run(give, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), "DIE_AT=row/live", Variable+"="+give)
			out, err := cmd.Output()
			status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
			if string(out) != want.out || (status.Signaled() && status.Signal() == syscall.SIGKILL) != want.killed {
				t.Errorf("it printed %q and ended with %v, %v", out, status, err)
			}
		})
	}
}

// nothingReached resets the counts of reached points.
func nothingReached() {
	mu.Lock()
	defer mu.Unlock()
	counted, reached = spec{}, 0
}

func TestFails(t *testing.T) {
	nothingReached()
	t.Setenv(Variable, "row/paused:2=error")
	if err := Err("row/paused"); err != nil {
		t.Errorf("first time: %v", err)
	}
	if err := Err("row/live"); err != nil {
		t.Errorf("another: %v", err)
	}
	if err := Err("row/paused"); !errors.Is(err, ErrArmed) || !strings.Contains(err.Error(), "row/paused") {
		t.Errorf("second time: %v", err)
	}
	if err := Err("row/paused"); err != nil {
		t.Errorf("third time: %v", err)
	}
}

func TestWaitsWhileAFileSaysSo(t *testing.T) {
	nothingReached()
	file := filepath.Join(t.TempDir(), "armed")
	t.Setenv(Variable, "@"+file)
	Reach("row/ended") // there is no file
	if err := os.WriteFile(file, []byte("row/ended=wait\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var released atomic.Bool
	was := make(chan bool)
	go func() {
		Reach("row/ended")
		was <- released.Load()
	}()
	for isThere := false; !isThere; runtime.Gosched() {
		mu.Lock()
		isThere = reached == 1
		mu.Unlock()
	}
	released.Store(true)
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if !<-was {
		t.Error("it did not wait")
	}
}

func TestParse(t *testing.T) {
	for _, bad := range []string{"no/such", "row/live:0", "row/live:x", "row/live=explode", ":1", "=wait"} {
		if s, err := parse(bad); err == nil {
			t.Errorf("parse(%q) = %+v", bad, s)
		}
	}
	if s, err := parse("row/live:7=wait"); err != nil || s != (spec{"row/live", "wait", 7}) {
		t.Errorf("parse = %+v, %v", s, err)
	}
}
