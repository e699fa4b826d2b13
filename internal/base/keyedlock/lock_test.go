package keyedlock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

// Removals wait for one another; a cancelled wait leaves nothing behind.
func TestKeyedLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Lock[string]
		first, release, err := l.Acquire(t.Context(), "a", true)
		if err != nil {
			t.Fatal(err)
		}
		_, other, err := l.Acquire(t.Context(), "b", false)
		if err != nil {
			t.Fatal(err)
		}
		other()
		cancelled, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, _, err := l.Acquire(cancelled, "a", false)
			ended <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("a cancelled wait: %v", err)
		}
		second := make(chan error, 1)
		go func() {
			_, done, err := l.Acquire(t.Context(), "a", true)
			defer done()
			second <- err
		}()
		synctest.Wait()
		if first.Err() != nil || len(second) > 0 {
			t.Errorf("a removal was interrupted by another, or both got the lock: %v, %d", first.Err(), len(second))
		}
		release()
		if err := <-second; err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if len(l.queues) > 0 {
			t.Errorf("left: %v", l.queues)
		}
	})
}

// A restore from disk continues after its caller's context ends, and ends when the sandbox is removed.
func TestUnlessInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Lock[string]
		caller, cancel := context.WithCancel(t.Context())
		held, release, err := l.Acquire(caller, "a", false)
		if err != nil {
			t.Fatal(err)
		}
		ctx, done := l.UnlessInterrupted(held, "a")
		defer done()
		cancel()
		if held.Err() == nil || ctx.Err() != nil {
			t.Errorf("after the end of the caller's context: %v, %v", held.Err(), ctx.Err())
		}
		removed := make(chan error, 1)
		go func() {
			_, done, err := l.Acquire(t.Context(), "a", true)
			done()
			removed <- err
		}()
		<-ctx.Done()
		again, done := l.UnlessInterrupted(held, "a")
		defer done()
		if !errors.Is(context.Cause(again), ErrInterrupted) {
			t.Errorf("begun after the interruption: %v", again.Err())
		}
		release()
		if err := <-removed; err != nil {
			t.Fatal(err)
		}
	})
}
