package footprint

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func TestPercent(t *testing.T) {
	for _, c := range []struct {
		live, garbage uint64
		want          int
	}{
		{0, 256 * mib, 6400}, // at the start
		{32 * mib, 256 * mib, 800},
		{64 * mib, 128 * mib, 200},
		{256 * mib, 256 * mib, 100},
		{4096 * mib, 256 * mib, 100}, // as Go has it
	} {
		if got := percent(c.live, c.garbage); got != c.want {
			t.Errorf("%d MiB of %d MiB: %d %%, want %d", c.garbage/mib, c.live/mib, got, c.want)
		}
	}
}

// TestDelayGC has another process set its pace, whose collections must follow what lives.
func TestDelayGC(t *testing.T) {
	if os.Getenv("DELAYS") != "" {
		delayed(t)
		return
	}
	for gogc, want := range map[string]string{"": "allowed", "100": "of the environment"} {
		again := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDelayGC$", "-test.v")
		again.Env = append(os.Environ(), "GOGC="+gogc, "DELAYS="+want)
		if out, err := again.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", want, err, out)
		}
	}
}

// delayed runs in the other process.
func delayed(t *testing.T) {
	end := DelayGC()
	if os.Getenv("DELAYS") == "of the environment" {
		if got := debug.SetGCPercent(100); got != 100 {
			t.Errorf("%d %%, want the environment's", got)
		}
		return
	}
	if got, want := heapGoal(), allowance(); got != want {
		t.Errorf("first collection at %d bytes, want %d", got, want)
	}
	for range 3 { // each collection sets the pace for the next
		live := make([]byte, 3*allowance())
		awaitGoal(t, "a heap larger than the allowance may double", func(goal uint64) bool { return goal < uint64(len(live))*5/2 })
		runtime.KeepAlive(live)
		awaitGoal(t, "a small heap may grow by the allowance", func(goal uint64) bool { return goal >= allowance() && goal < 2*allowance() })
	}
	end()
	awaitGoal(t, "a small heap may double after the start", func(goal uint64) bool { return goal < 64*mib })
	if got := debug.SetGCPercent(100); got != 100 {
		t.Errorf("%d %% after the start", got)
	}
}

func heapGoal() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/goal:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// awaitGoal collects garbage until the goal of the heap is right: the pace follows a collection a moment later.
func awaitGoal(t *testing.T, what string, right func(goal uint64) bool) {
	t.Helper()
	eventually.NoError(t, what, func() error {
		runtime.GC()
		if goal := heapGoal(); !right(goal) {
			return fmt.Errorf("the next collection is at %d bytes", goal)
		}
		return nil
	})
}
