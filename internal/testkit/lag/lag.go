// Package lag holds a cache back, for tests of what is built on one: between hold and release
// its watches deliver nothing, and then everything, in order. What does not come through a
// watch is answered at once: writes, and reads of one object.
//
// It delays and does nothing else. A watch that is held for so long that the server closes it
// is resumed by its client as ever.
package lag

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"

	"k8s.io/client-go/rest"
)

// Option narrows or widens what is held.
type Option func(*valve)

// Only holds the watches of some resources, by their plural names; the others flow.
func Only(resources ...string) Option { return func(v *valve) { v.only = resources } }

// Lists delays list responses too. They hold the state at the time of the request.
func Lists() Option { return func(v *valve) { v.lists = true } }

// New returns a copy of a configuration for what is to lag, and what holds and releases it.
// Nothing is held at first. What the server sends after hold has returned arrives after
// release; both may be called at any time, and again.
func New(cfg *rest.Config, opts ...Option) (lagging *rest.Config, hold, release func()) {
	v := &valve{open: make(chan struct{})}
	close(v.open)
	for _, opt := range opts {
		opt(v)
	}
	lagging = rest.CopyConfig(cfg)
	lagging.Wrap(func(next http.RoundTripper) http.RoundTripper { return &transport{next: next, valve: v} })
	return lagging, v.hold, v.release
}

// valve is open or holds.
type valve struct {
	only  []string
	lists bool

	mu   sync.Mutex
	held bool          // +checklocks:mu
	open chan struct{} // closed while nothing is held; +checklocks:mu
}

func (v *valve) hold() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.held {
		v.held, v.open = true, make(chan struct{})
	}
}

func (v *valve) release() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.held {
		v.held = false
		close(v.open)
	}
}

// pass returns once nothing is held, or with the error of a context that ends first.
func (v *valve) pass(ctx context.Context) error {
	v.mu.Lock()
	open := v.open
	v.mu.Unlock()
	select {
	case <-open:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// holds reports whether the answer to a request is one to hold.
func (v *valve) holds(req *http.Request) bool {
	resource, name := target(req.URL.Path)
	if req.Method != http.MethodGet || resource == "" {
		return false
	}
	if len(v.only) > 0 && !slices.Contains(v.only, resource) {
		return false
	}
	if watch := req.URL.Query().Get("watch"); watch == "true" || watch == "1" {
		return true
	}
	return v.lists && name == ""
}

// target takes a request's path apart: /apis/GROUP/VERSION or /api/VERSION, then
// [/namespaces/NAMESPACE]/RESOURCE[/NAME]. All that follows is left out.
func target(path string) (resource, name string) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	switch {
	case len(parts) > 3 && parts[0] == "apis":
		parts = parts[3:]
	case len(parts) > 2 && parts[0] == "api":
		parts = parts[2:]
	default:
		return "", ""
	}
	if len(parts) > 2 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	if len(parts) > 1 {
		name = parts[1]
	}
	return parts[0], name
}

// transport holds the bodies of answers.
type transport struct {
	next  http.RoundTripper
	valve *valve
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(req)
	if err != nil || !t.valve.holds(req) {
		return resp, err
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	resp.Body = &body{ReadCloser: resp.Body, pass: func() error { return t.valve.pass(ctx) }, cancel: cancel}
	return resp, nil
}

// body hands out what it has read once nothing is held.
type body struct {
	io.ReadCloser
	pass   func() error
	cancel context.CancelCauseFunc
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if ended := b.pass(); ended != nil {
		return 0, ended
	}
	return n, err
}

// Close ends a Read that is held.
func (b *body) Close() error {
	b.cancel(http.ErrBodyReadAfterClose)
	return b.ReadCloser.Close()
}
