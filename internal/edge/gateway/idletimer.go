package gateway

import (
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// idleTimer ends an exchange after a time without data in either direction. A nil one never does.
type idleTimer struct {
	limit time.Duration
	clock func() time.Duration
	cut   func()
	last  atomic.Int64 // when data last moved, by clock
	fired atomic.Bool

	mu    sync.Mutex
	over  bool        // +checklocks:mu
	timer *time.Timer // +checklocks:mu
}

// watch starts a timer if StreamIdle is set; cut ends the exchange.
func (g *Gateway) watch(cut func()) *idleTimer {
	if g.cfg.StreamIdle <= 0 {
		return nil
	}
	q := &idleTimer{limit: g.cfg.StreamIdle, clock: g.clock, cut: cut}
	q.touch()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.timer = time.AfterFunc(q.limit, q.look)
	return q
}

// touch records that data moved.
func (q *idleTimer) touch() {
	if q != nil {
		q.last.Store(int64(q.clock()))
	}
}

func (q *idleTimer) look() {
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
	q.cut() // under the lock: nothing is cut after stop
}

// stop stops the timer, and reports whether it has cut the exchange.
func (q *idleTimer) stop() bool {
	if q == nil {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.over = true
	q.timer.Stop()
	return q.fired.Load()
}

// reading returns a reader that touches the timer with each read.
func (q *idleTimer) reading(r io.Reader) io.Reader {
	if q == nil {
		return r // unwrapped, so that splice(2) remains possible
	}
	return watched{r, q}
}

type watched struct {
	io.Reader
	q *idleTimer
}

// Read implements io.Reader.
func (w watched) Read(p []byte) (int, error) {
	n, err := w.Reader.Read(p)
	if n > 0 {
		w.q.touch()
	}
	return n, err
}
