package traffic

import (
	"math"
	"sync/atomic"
	"time"
)

// Counter counts the requests of one epoch of a sandbox and records the last use. It costs a request
// three atomic operations. While it is held, no request begins. Times are those of one clock that does
// not jump. The zero value is ready.
type Counter struct {
	count atomic.Int64                  // in progress; far below zero while held
	last  atomic.Int64                  // end of the last request
	held  atomic.Pointer[chan struct{}] // closed when the hold ends; nil without one
}

const holdMark = math.MinInt64 / 2

// Begin counts a request, and reports false while the epoch is held.
func (c *Counter) Begin() bool {
	if c.count.Add(1) > 0 {
		return true
	}
	c.count.Add(-1)
	return false
}

// Count returns the requests in progress; less than 0 while the epoch is held.
func (c *Counter) Count() int64 { return c.count.Load() }

// End ends a request that Begin counted.
func (c *Counter) End(now time.Duration) {
	c.Touch(now)
	c.count.Add(-1)
}

// Cancel ends a request that Begin counted and that was refused: it is no use of the sandbox.
func (c *Counter) Cancel() { c.count.Add(-1) }

// Touch records a use.
func (c *Counter) Touch(now time.Duration) { c.last.Store(int64(now)) }

// Idle returns the end of the last request, and whether one is in progress.
func (c *Counter) Idle() (last time.Duration, busy bool) {
	return time.Duration(c.last.Load()), c.count.Load() > 0
}

// Hold keeps requests from beginning, if none is in progress and none ended after last. There is at
// most one hold at a time. release must be called.
func (c *Counter) Hold(last time.Duration) (release func(), ok bool) {
	done := make(chan struct{})
	if !c.held.CompareAndSwap(nil, &done) {
		return nil, false
	}
	marked := c.count.CompareAndSwap(0, holdMark)
	release = func() {
		if marked {
			c.count.Add(-holdMark)
		}
		c.held.Store(nil)
		close(done)
	}
	if !marked || c.last.Load() > int64(last) {
		release()
		return nil, false
	}
	return release, true
}

// Held returns a channel that is closed when the hold ends. Nil: there is no hold.
func (c *Counter) Held() <-chan struct{} {
	if held := c.held.Load(); held != nil {
		return *held
	}
	return nil
}
