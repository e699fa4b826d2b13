// Package eventually polls, in tests, for conditions that no event announces.
package eventually

import (
	"testing"
	"time"
)

// Patience bounds every wait. It is no measure of speed: only a fault uses it up, and the
// machines that run the tests stand still for seconds at a time.
const Patience = 2 * time.Minute

const every = 5 * time.Millisecond

// True polls until check returns true.
func True(t testing.TB, what string, check func() bool) {
	t.Helper()
	wait(t, what, func() (bool, error) { return check(), nil })
}

// NoError polls until check returns nil; at the timeout it reports the last error.
func NoError(t testing.TB, what string, check func() error) {
	t.Helper()
	wait(t, what, func() (bool, error) {
		err := check()
		return err == nil, err
	})
}

func wait(t testing.TB, what string, check func() (bool, error)) {
	t.Helper()
	tick := time.NewTicker(every)
	defer tick.Stop()
	end := time.After(Patience)
	for {
		ok, err := check()
		if ok {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("%s: not within %v (last error: %v)", what, Patience, err)
		}
	}
}
