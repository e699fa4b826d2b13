// Package traffic counts requests in progress and ends those without data: for a shutdown that waits for
// all of them, for idle policies, and for the timeout of streams. It decides nothing.
//
// Lock order: the function of an IdleTimer runs with IdleTimer.mu held; otherwise no two are held together.
package traffic

import "sync"

// Tracker counts the requests in progress, so that a shutdown can wait for them. Make one with NewTracker.
type Tracker struct {
	// Abort closes the channel of Aborted.
	Abort   func()
	aborted chan struct{}

	mu       sync.Mutex
	count    int           // +checklocks:mu
	draining bool          // +checklocks:mu
	idle     chan struct{} // +checklocks:mu
}

// NewTracker returns a tracker without requests.
func NewTracker() *Tracker {
	aborted := make(chan struct{})
	return &Tracker{Abort: sync.OnceFunc(func() { close(aborted) }), aborted: aborted}
}

// Begin counts a request, and reports false while draining.
func (f *Tracker) Begin() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.draining {
		return false
	}
	f.count++
	return true
}

// Join counts a helper of a request in progress.
func (f *Tracker) Join() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count++
}

// End ends what Begin or Join counted.
func (f *Tracker) End() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.count--; f.count == 0 && f.draining {
		close(f.idle)
	}
}

// Count returns the requests in progress, and whether new ones are refused.
func (f *Tracker) Count() (n int, draining bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count, f.draining
}

// Drain makes Begin report false. The channel is closed when nothing is in progress.
func (f *Tracker) Drain() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.draining {
		f.draining = true
		f.idle = make(chan struct{})
		if f.count == 0 {
			close(f.idle)
		}
	}
	return f.idle
}

// Aborted is closed when requests must end.
func (f *Tracker) Aborted() <-chan struct{} { return f.aborted }
