package server

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/connlimit"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// serve serves a handler over HTTP, with at most 100 connections and requests of a client, and returns the address.
func serve(t *testing.T, h http.Handler) string {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := New(connlimit.Requests(h, 100), telemetry.Discard(), time.Minute, nil)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(connlimit.New(l, 100)) })
	t.Cleanup(func() { _ = s.Close(); wg.Wait() })
	return l.Addr().String()
}

// client is one of HTTP/2 that reads only on request.
type client struct {
	*http2.Framer
	t       *testing.T
	conn    net.Conn
	block   bytes.Buffer
	headers *hpack.Encoder
}

// dial opens a connection on which no response may have a body.
func dial(t *testing.T, address string) *client {
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(eventually.Patience))
	c := &client{Framer: http2.NewFramer(conn, conn), t: t, conn: conn}
	c.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	c.headers = hpack.NewEncoder(&c.block)
	_, err = io.WriteString(conn, http2.ClientPreface)
	c.must(err)
	c.must(c.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
	return c
}

func (c *client) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// request sends the head of a request.
func (c *client) request(stream uint32, end bool, more ...hpack.HeaderField) {
	c.t.Helper()
	c.block.Reset()
	for _, f := range append([]hpack.HeaderField{{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":authority", Value: "x"}, {Name: ":path", Value: "/"}}, more...) {
		c.must(c.headers.WriteField(f))
	}
	block, most := c.block.Bytes(), 16<<10
	first := block[:min(most, len(block))]
	c.must(c.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: first, EndStream: end, EndHeaders: len(first) == len(block)}))
	for rest := block[len(first):]; len(rest) > 0; {
		k := min(most, len(rest))
		c.must(c.WriteContinuation(stream, k == len(rest), rest[:k]))
		rest = rest[k:]
	}
}

// response reads up to the next head of a response.
func (c *client) response() *http2.MetaHeadersFrame {
	c.t.Helper()
	for {
		frame, err := c.ReadFrame()
		c.must(err)
		if head, ok := frame.(*http2.MetaHeadersFrame); ok {
			return head
		}
	}
}

// responds reports whether a response with status 200 comes before the connection ends.
func (c *client) responds() bool {
	for {
		frame, err := c.ReadFrame()
		if err != nil {
			return false
		}
		if head, ok := frame.(*http2.MetaHeadersFrame); ok {
			return head.PseudoValue("status") == "200"
		}
	}
}

// TestHeads requires that a client cannot have the server keep large heads of requests.
func TestHeads(t *testing.T) {
	address := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for size, want := range map[int]int{60 << 10: http.StatusOK, 100 << 10: http.StatusRequestHeaderFieldsTooLarge} {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(eventually.Patience))
		_, _ = fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-A: %s\r\n\r\n", strings.Repeat("a", size))
		status := make([]byte, len("HTTP/1.1 200"))
		_, _ = io.ReadFull(conn, status)
		if _ = conn.Close(); string(status) != fmt.Sprintf("HTTP/1.1 %d", want) {
			t.Errorf("a head of %d bytes over HTTP/1.1: %q, want %d", size, status, want)
		}
		c := dial(t, address)
		c.request(1, true, hpack.HeaderField{Name: "x-a", Value: strings.Repeat("a", size)})
		if got := c.responds(); got != (want == http.StatusOK) {
			t.Errorf("a head of %d bytes over HTTP/2 got a response: %v", size, got)
		}
	}
}

// TestWindows requires that only the first connections of a client let it have the server keep much of a body that nothing reads.
func TestWindows(t *testing.T) {
	address := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for i := range wideConns + 1 {
		frame, err := dial(t, address).ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		want := wide.MaxReceiveBufferPerStream
		if i >= wideConns {
			want = narrow.MaxReceiveBufferPerStream
		}
		if got, _ := frame.(*http2.SettingsFrame).Value(http2.SettingInitialWindowSize); int(got) != want {
			t.Errorf("connection %d: a stream's window has %d bytes, want %d", i, got, want)
		}
	}
}

// TestRequestsOfAClient has a client open more requests than it may, over several connections. They have ended but for their
// responses, which it does not take.
func TestRequestsOfAClient(t *testing.T) {
	address := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "x") }))
	one, other := dial(t, address), dial(t, address)
	for i := range uint32(50) {
		for _, c := range []*client{one, other} {
			c.request(2*i+1, true)
			c.response()
		}
	}
	one.request(101, true)
	if head := one.response(); head.PseudoValue("status") != "429" || !head.StreamEnded() {
		t.Errorf("request 101 of a client: %s, ended: %v; want 429 without a body", head.PseudoValue("status"), head.StreamEnded())
	}
	one.must(one.WriteWindowUpdate(1, 1))
	for frame, err := one.ReadFrame(); !frame.Header().Flags.Has(http2.FlagDataEndStream); frame, err = one.ReadFrame() {
		one.must(err)
	}
	one.request(103, true)
	if head := one.response(); head.PseudoValue("status") != "200" {
		t.Errorf("after the client took a response: %s", head.PseudoValue("status"))
	}
}

// TestUnreadBody requires that the server drops a body that nothing reads, while the response waits for the client.
func TestUnreadBody(t *testing.T) {
	bodies := make(chan io.Reader, 1)
	address := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "no")
		bodies <- r.Body
	}))
	c := dial(t, address)
	c.request(1, false)
	c.must(c.WriteData(1, false, make([]byte, 1000)))
	c.response() // it is sent when the handler has returned
	if n, err := (<-bodies).Read(make([]byte, 1000)); n > 0 || err == nil {
		t.Errorf("%d bytes of the body are left, %v", n, err)
	}
}
