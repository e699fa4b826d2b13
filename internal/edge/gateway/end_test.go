package gateway

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/coder/websocket"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestStreamsEndWithTheSandbox kills, pauses or moves a sandbox under a stream, a WebSocket and
// an upload. All must end at once, and the next request must be refused or reach the new life.
func TestStreamsEndWithTheSandbox(t *testing.T) {
	w := newFixture(t)
	var silences atomic.Int32
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/ws":
			echoWebSocket(w, r)
		case "/stream":
			_, _ = io.WriteString(w, "first\n")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		case "/silent":
			silences.Add(1)
			<-r.Context().Done()
		default:
			_, _ = io.WriteString(w, "hello")
		}
	})
	ends := map[string]struct {
		end  func(*box)
		want int
	}{
		"killed": {(*box).kill, http.StatusBadGateway},
		"paused": {func(b *box) { b.sleep(); b.apply() }, http.StatusBadGateway},
		"moved":  {func(b *box) { b.run("10.9.0.77"); b.apply() }, http.StatusOK},
		"gone":   {func(b *box) { b.w.table.ApplyDelete(b.Sandbox) }, http.StatusBadGateway},
	}
	clients := w.clients(t)
	for how, end := range ends {
		for name, c := range clients {
			t.Run(how+"/"+name, func(t *testing.T) {
				b := w.box(how + name)
				req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url(port, "/stream"), nil)
				res, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = res.Body.Close() }()
				if line, err := bufio.NewReader(res.Body).ReadString('\n'); err != nil || line != "first\n" {
					t.Fatalf("got %q, %v", line, err)
				}
				before := silences.Load()
				silent := make(chan int, 1)
				go func() { silent <- w.statusOf(c, b.url(port, "/silent")) }()
				// One that has not been sent when the epoch ends may use the next.
				eventually.True(t, "the silent request has been sent", func() bool { return silences.Load() > before })
				end.end(b)
				if _, err := io.ReadAll(res.Body); err == nil {
					t.Error("the stream ended as if it were whole")
				}
				if status := <-silent; status != http.StatusBadGateway && end.want != http.StatusOK {
					t.Errorf("silent request got %d", status)
				}
				if res, text := w.do(c, http.MethodGet, b.url(port, "/"), nil); res.StatusCode != end.want { //nolint:bodyclose // do closes it
					t.Errorf("next request got %d %s, want %d", res.StatusCode, text, end.want)
				}
			})
		}
		t.Run(how+"/websocket", func(t *testing.T) {
			b := w.box(how + "ws")
			conn, _, err := websocket.Dial(t.Context(), b.url(port, "/ws"), &websocket.DialOptions{HTTPClient: w.client}) //nolint:bodyclose // the library does
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.CloseNow() }()
			end.end(b)
			if _, _, err := conn.Read(t.Context()); err == nil {
				t.Error("the WebSocket lives on")
			}
		})
	}
	w.idle()
}

func (w *fixture) flying() int {
	n, _ := w.gateway.requests.Count()
	return n
}

// TestServiceDiesMidStream closes the service's connection in the middle of a body.
func TestServiceDiesMidStream(t *testing.T) {
	w := newFixture(t)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/sized" {
			w.Header().Set("Content-Length", "1000000")
		}
		_, _ = io.WriteString(w, "part")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	b := w.box("a")
	for name, c := range w.clients(t) {
		for _, path := range []string{"/sized", "/chunked"} {
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url(port, path), nil)
			res, err := c.Do(req)
			if err != nil {
				continue // the reset came before the head could be read
			}
			text, err := io.ReadAll(res.Body)
			_ = res.Body.Close()
			if err == nil {
				t.Errorf("%s %s: broken body %q looks whole", name, path, text)
			}
		}
	}
}

// TestReusedAddress gives a sandbox's address to another while a connection to the first is idle.
func TestReusedAddress(t *testing.T) {
	w := newFixture(t, func(c *Config) { c.ServiceIdle = eventually.Patience })
	port := backend(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.RemoteAddr) })
	first := w.box("first")
	w.get(first.url(port, "/")) // the fast path opens a connection of its own
	_, one := w.get(first.url(port, "/"))
	if _, again := w.get(first.url(port, "/")); again != one {
		t.Fatalf("the connection was not used again: %s, then %s", one, again)
	}
	first.kill()
	second := w.box("second", func(s *agents.Sandbox) { s.Status.PodIPs = first.Status.PodIPs })
	if _, other := w.get(second.url(port, "/")); other == one {
		t.Errorf("the second sandbox got the first one's connection %s", one)
	}
	_, one = w.get(second.url(port, "/"))
	second.run(first.Status.PodIPs[0]) // a resume at the same address is another life
	second.apply()
	if _, other := w.get(second.url(port, "/")); other == one {
		t.Errorf("the resumed sandbox got a connection %s of its former life", one)
	}
}

func TestDrain(t *testing.T) {
	w := newFixture(t)
	finish := make(chan struct{})
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/ws" {
			echoWebSocket(w, r)
			return
		}
		_ = http.NewResponseController(w).Flush()
		<-finish
		_, _ = io.WriteString(w, "whole")
	})
	b := w.box("a", func(*agents.Sandbox) {})
	conn, _, err := websocket.Dial(t.Context(), b.url(port, "/ws"), &websocket.DialOptions{HTTPClient: w.client}) //nolint:bodyclose // the library does
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseNow() }()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url(port, "/"), nil)
	res, err := w.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	drained := make(chan error, 1)
	go func() { drained <- w.gateway.Drain(ctx) }()
	eventually.True(t, "the drain has begun", func() bool { // a request before that would be served
		_, draining := w.gateway.requests.Count()
		return draining
	})
	if status, text := w.get(b.url(port, "/")); status != http.StatusServiceUnavailable {
		t.Errorf("a new request got %d %s", status, text)
	}
	close(finish)
	if text, err := io.ReadAll(res.Body); err != nil || string(text) != "whole" {
		t.Errorf("request under way got %q, %v", text, err)
	}
	cancel() // the WebSocket does not end on its own
	if err := <-drained; !errors.Is(err, context.Canceled) {
		t.Errorf("Drain = %v, want that it had to cut", err)
	}
	if _, _, err := conn.Read(t.Context()); err == nil {
		t.Error("the WebSocket outlived the drain")
	}
}
