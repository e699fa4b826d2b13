package cache_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// gap breaks watches of sandboxes: between hold and cut they deliver nothing, then they end, and the
// version to resume them from is too old.
type gap struct {
	next http.RoundTripper
	read chan struct{} // holds a token after each answer to a read of one sandbox

	mu     sync.Mutex
	held   bool
	bodies []io.Closer
	cutOff chan struct{} // closed by cut
}

func newGap() *gap { return &gap{read: make(chan struct{}, 100), cutOff: make(chan struct{})} }

func (g *gap) wrap(next http.RoundTripper) http.RoundTripper {
	g.next = next
	return g
}

func (g *gap) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = true
}

func (g *gap) cut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = false
	close(g.cutOff)
	for _, b := range g.bodies {
		_ = b.Close()
	}
}

func (g *gap) RoundTrip(r *http.Request) (*http.Response, error) {
	q := r.URL.Query()
	isWatch := strings.HasSuffix(r.URL.Path, "/sandboxes") && (q.Get("watch") == "true" || q.Get("watch") == "1")
	isCut := false
	select {
	case <-g.cutOff:
		isCut = true
	default:
	}
	if isWatch && isCut && q.Get("sendInitialEvents") != "true" {
		return &http.Response{
			StatusCode: http.StatusGone, Request: r, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{"Content-Type": {"application/json"}},
			Body: io.NopCloser(strings.NewReader(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410,"message":"too old resource version"}`)),
		}, nil
	}
	resp, err := g.next.RoundTrip(r)
	switch {
	case err != nil:
	case isWatch && !isCut:
		g.mu.Lock()
		g.bodies = append(g.bodies, resp.Body)
		g.mu.Unlock()
		resp.Body = &gapBody{resp.Body, g}
	case r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/sandboxes/"):
		g.read <- struct{}{}
	}
	return resp, err
}

type gapBody struct {
	io.ReadCloser
	gap *gap
}

func (b *gapBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.gap.mu.Lock()
	held := b.gap.held
	b.gap.mu.Unlock()
	if held {
		<-b.gap.cutOff
	}
	select {
	case <-b.gap.cutOff:
		return 0, io.EOF
	default:
		return n, err
	}
}

// A wait that read the object from the API server ends although no event reports its deletion.
func TestWaitOverAListThatLacksTheObject(t *testing.T) {
	cfg, g := serve(t), newGap()
	cfg.Wrap(g.wrap)
	c, _ := startOn(t, cfg)
	g.hold()
	made := create(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := c.WaitSandbox(ctx, client.ObjectKeyFromObject(made), gone)
		done <- err
	}()
	<-g.read // the wait has been answered that the object is there
	if err := c.Live().Delete(t.Context(), made); err != nil {
		t.Fatal(err)
	}
	g.cut()
	if err := <-done; err != nil {
		t.Error(err)
	}
	other := &agents.Sandbox{Spec: made.Spec}
	other.Namespace, other.Name = made.Namespace, "later"
	if err := c.Live().Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if _, err := c.WaitSandbox(t.Context(), client.ObjectKeyFromObject(other), there); err != nil {
		t.Errorf("after the list, the watch does not flow: %v", err)
	}
}
