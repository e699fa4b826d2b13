package apiserver

import (
	"context"
	"net/http"
	"sync"
)

// drainer lets a handler's requests end before what they use is taken away: when it drains,
// new ones are refused, watches are cut and the others get their time.
type drainer struct {
	next http.Handler

	mu      sync.Mutex
	active  int                                  // +checklocks:mu
	watches map[*http.Request]context.CancelFunc // +checklocks:mu
	// nil until drain, closed when none is active
	draining chan struct{} // +checklocks:mu
}

func newDrainer(next http.Handler) *drainer {
	return &drainer{next: next, watches: map[*http.Request]context.CancelFunc{}}
}

// isWatch reports whether a request streams until one side ends it: a watch, a log that is
// followed, or a connection that becomes another protocol's.
func isWatch(r *http.Request) bool {
	q := r.URL.Query()
	return isTrue(q, "watch") || isTrue(q, "follow") || r.Header.Get("Upgrade") != ""
}

// ServeHTTP implements http.Handler.
func (d *drainer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var cancel context.CancelFunc
	if isWatch(r) {
		var ctx context.Context
		ctx, cancel = context.WithCancel(r.Context())
		defer cancel()
		r = r.WithContext(ctx)
	}
	if !d.enter(r, cancel) {
		w.Header().Set("Retry-After", "1")
		http.Error(w, "the API server is stopping", http.StatusServiceUnavailable)
		return
	}
	defer d.leave(r)
	d.next.ServeHTTP(w, r)
}

func (d *drainer) enter(r *http.Request, cancel context.CancelFunc) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.draining != nil {
		return false
	}
	d.active++
	if cancel != nil {
		d.watches[r] = cancel
	}
	return true
}

func (d *drainer) leave(r *http.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.active--
	delete(d.watches, r)
	if d.draining != nil && d.active == 0 {
		close(d.draining)
	}
}

// drain returns when no request is left, or ctx is done. It is called once.
func (d *drainer) drain(ctx context.Context) {
	select {
	case <-d.refuse():
	case <-ctx.Done():
	}
}

func (d *drainer) refuse() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.draining = make(chan struct{})
	if d.active == 0 {
		close(d.draining)
	}
	for _, cancel := range d.watches {
		cancel()
	}
	return d.draining
}
