// Package eventually waits, in tests, for what comes by itself and tells nobody by an event.
package eventually

import (
	"testing"
	"time"
)

// Patience bounds every wait. It is no measure of speed: only a fault uses it up, and the
// machines that run the tests stand still for seconds at a time.
const Patience = 2 * time.Minute

const every = 5 * time.Millisecond

// True asks until the answer is yes.
func True(t testing.TB, what string, ask func() bool) {
	t.Helper()
	wait(t, what, func() (bool, error) { return ask(), nil })
}

// NoError asks until there is no error. The last one is told if there always is.
func NoError(t testing.TB, what string, ask func() error) {
	t.Helper()
	wait(t, what, func() (bool, error) {
		err := ask()
		return err == nil, err
	})
}

func wait(t testing.TB, what string, ask func() (bool, error)) {
	t.Helper()
	tick := time.NewTicker(every)
	defer tick.Stop()
	end := time.After(Patience)
	for {
		ok, err := ask()
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
