package traffic

import (
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// IdleTimer ends an exchange after a time without data in either direction. A nil one never does.
type IdleTimer struct {
	limit time.Duration
	clock func() time.Duration
	end   func()
	last  atomic.Int64 // when data last moved, by clock
	fired atomic.Bool

	mu    sync.Mutex
	over  bool        // +checklocks:mu
	timer *time.Timer // +checklocks:mu
}

// NewIdleTimer starts a timer; end ends the exchange. A limit of 0 or less returns nil.
func NewIdleTimer(limit time.Duration, clock func() time.Duration, end func()) *IdleTimer {
	if limit <= 0 {
		return nil
	}
	q := &IdleTimer{limit: limit, clock: clock, end: end}
	q.Touch()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.timer = time.AfterFunc(q.limit, q.check)
	return q
}

// Touch records that data moved.
func (q *IdleTimer) Touch() {
	if q != nil {
		q.last.Store(int64(q.clock()))
	}
}

func (q *IdleTimer) check() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.over {
		return
	}
	if left := q.limit - (q.clock() - time.Duration(q.last.Load())); left > 0 {
		q.timer.Reset(left)
		return
	}
	q.fired.Store(true)
	q.end() // under the lock: nothing ends after Stop
}

// Stop stops the timer, and reports whether it has ended the exchange.
func (q *IdleTimer) Stop() bool {
	if q == nil {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.over = true
	q.timer.Stop()
	return q.fired.Load()
}

// Fired reports whether the timer has ended the exchange.
func (q *IdleTimer) Fired() bool { return q != nil && q.fired.Load() }

// Reading returns a reader that touches the timer with each read.
func (q *IdleTimer) Reading(r io.Reader) io.Reader {
	if q == nil {
		return r // unwrapped, so that splice(2) remains possible
	}
	return watched{r, q}
}

type watched struct {
	io.Reader
	q *IdleTimer
}

// Read implements io.Reader.
func (w watched) Read(p []byte) (int, error) {
	n, err := w.Reader.Read(p)
	if n > 0 {
		w.q.Touch()
	}
	return n, err
}
