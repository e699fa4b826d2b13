package node

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// TestInitializations: one attempt at a time, each failure is read once, and attempts after failures begin later and later,
// but for what was missing.
func TestInitializations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, ref := &initializations{}, sandbox.Ref{Namespace: "ns", Name: "s", UID: "u"}
		expect := func(first, unread, running bool) {
			t.Helper()
			if now, is := x.begin(ref); is != first || now.unread != unread || now.running != running {
				t.Errorf("begin = %+v, %v", now, is)
			}
		}
		fails := func(err error, want time.Duration) {
			t.Helper()
			if pause := x.end(ref, err); pause != want {
				t.Errorf("pause %s, want %s", pause, want)
			}
		}
		broken := errors.New("broken")
		expect(true, false, true)
		expect(false, false, true)
		fails(&podsource.Missing{}, 0)
		expect(false, true, false)
		for _, pause := range []time.Duration{0, time.Second, 2 * time.Second, 4 * time.Second} {
			expect(true, false, true)
			fails(broken, pause)
			expect(false, true, false)
			if pause > 0 {
				time.Sleep(pause - 1)
				expect(false, false, false)
				time.Sleep(time.Nanosecond)
			}
		}
		for range 20 {
			expect(true, false, true)
			last := x.end(ref, broken)
			expect(false, true, false)
			time.Sleep(last)
			if last > maxInitPause {
				t.Errorf("pause %s", last)
			}
		}
		x.forget("ns", "s")
		expect(true, false, true)
		x.forget("ns", "s") // it runs
		expect(false, false, true)
		fails(nil, 0)
		x.mu.Lock()
		defer x.mu.Unlock()
		if len(x.all) != 0 {
			t.Errorf("left: %v", x.all)
		}
	})
}
