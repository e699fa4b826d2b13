package lifecycle

import (
	"context"
	"time"
)

// Every calls f at once and then at an interval, until ctx is done; it then returns nil. Calls never
// overlap: a tick during a call is dropped.
func Every(ctx context.Context, interval time.Duration, f func()) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		f()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Sleep waits, and reports whether ctx is still active.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
