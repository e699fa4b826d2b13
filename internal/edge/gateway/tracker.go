package gateway

import "sync"

// requestTracker counts the requests in progress, so that a shutdown can wait for them.
type requestTracker struct {
	cut chan struct{} // closed when waiting is over

	mu       sync.Mutex
	count    int           // +checklocks:mu
	draining bool          // +checklocks:mu
	wasCut   bool          // +checklocks:mu
	idle     chan struct{} // +checklocks:mu
}

// begin counts a request, and reports false while draining.
func (f *requestTracker) begin() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.draining {
		return false
	}
	f.count++
	return true
}

// join counts a helper of a request in progress.
func (f *requestTracker) join() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count++
}

func (f *requestTracker) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.count--; f.count == 0 && f.draining {
		close(f.idle)
	}
}

// drain makes begin report false; the channel is closed when nothing is in progress.
func (f *requestTracker) drain() <-chan struct{} {
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

func (f *requestTracker) abortAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.wasCut {
		f.wasCut = true
		close(f.cut)
	}
}
