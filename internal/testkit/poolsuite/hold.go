package poolsuite

import (
	"io"
	"net/http"
	"strings"
	"sync"

	"k8s.io/client-go/rest"
)

// Hold delays the events of the API server's watches of one resource.
type Hold struct {
	resource string

	mu   sync.Mutex
	gate chan struct{} // closed while nothing is held; +checklocks:mu
}

// NewHold returns a copy of a REST config whose watches of a resource, such as "sandboxes", can
// be held back.
func NewHold(cfg *rest.Config, resource string) (*rest.Config, *Hold) {
	h := &Hold{resource: resource, gate: make(chan struct{})}
	close(h.gate)
	cfg = rest.CopyConfig(cfg)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return &holdingTransport{next, h} })
	return cfg, h
}

// Set begins to hold, or lets everything pass that was held.
func (h *Hold) Set(held bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.gate:
		if held {
			h.gate = make(chan struct{})
		}
	default:
		if !held {
			close(h.gate)
		}
	}
}

func (h *Hold) passes() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.gate
}

type holdingTransport struct {
	next http.RoundTripper
	hold *Hold
}

func (t *holdingTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(req)
	if err == nil && req.URL.Query().Get("watch") != "" && strings.HasSuffix(req.URL.Path, "/"+t.hold.resource) {
		resp.Body = &heldBody{resp.Body, t.hold, req.Context().Done()}
	}
	return resp, err
}

type heldBody struct {
	io.ReadCloser
	hold  *Hold
	ended <-chan struct{}
}

// Read hands over only what it may: what is read while the gate shuts waits as well.
func (b *heldBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	select {
	case <-b.hold.passes():
	case <-b.ended:
	}
	return n, err
}
