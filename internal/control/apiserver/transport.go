package apiserver

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"

	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// watchBuffer limits the unread bytes of a watch; the server waits beyond it.
const watchBuffer = 1 << 20

// keptBuffer is the greatest empty buffer that a watch keeps for its next events: the first list would leave it a MiB for life.
const keptBuffer = 16 << 10

// userKey is the context key of the in-process transport's user. Requests from the network never
// set it.
type userKey struct{}

func userFromTransport(ctx context.Context) (user.Info, bool) {
	u, ok := ctx.Value(userKey{}).(user.Info)
	return u, ok
}

// localTransport is an http.RoundTripper for one user, without socket, TLS and framing. Plain
// requests run on the caller's goroutine; watches stream.
type localTransport struct {
	server *Server
	user   user.Info
}

func (t *localTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body != nil {
		defer func() { _ = req.Body.Close() }()
	}
	h := t.server.local.Load()
	if h == nil {
		return nil, fmt.Errorf("%w: the API server is not running", errs.ErrUnavailable)
	}
	ctx, cancel := context.WithCancel(context.WithValue(req.Context(), userKey{}, t.user))
	w := newMemResponse(isWatch(req))
	w.release = cancel
	sreq := serverRequest(ctx, req)
	if !w.stream {
		w.serve(h, sreq)
		cancel()
		return w.response(req)
	}
	go w.serve(h, sreq) // ends with ctx, or when the server stops; the drainer waits for it
	unblock := context.AfterFunc(ctx, func() { w.finish(context.Cause(ctx)) })
	w.release = func() {
		unblock()
		cancel()
	}
	select {
	case <-w.ready:
		return w.response(req)
	case <-ctx.Done():
		w.release()
		return nil, context.Cause(ctx)
	}
}

// serverRequest returns the request as a server reads it from a connection.
func serverRequest(ctx context.Context, req *http.Request) *http.Request {
	r := req.Clone(ctx)
	r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
	r.RequestURI = req.URL.RequestURI()
	r.RemoteAddr = "127.0.0.1:0"
	if r.Host == "" {
		r.Host = req.URL.Host
	}
	if r.Body == nil {
		r.Body = http.NoBody
	}
	return r
}

// memResponse is both the server's ResponseWriter and the client's Body.
type memResponse struct {
	header  http.Header
	stream  bool          // a reader reads while the handler writes; never changed
	ready   chan struct{} // closed when the status is known
	release func()        // ends the handler

	mu       sync.Mutex
	cond     sync.Cond
	buf      bytes.Buffer // +checklocks:mu
	sent     http.Header  // +checklocks:mu
	code     int          // +checklocks:mu
	closed   bool         // by the client; +checklocks:mu
	err      error        // after the last byte, nil until the handler has ended; +checklocks:mu
	panicked any          // +checklocks:mu
}

func newMemResponse(stream bool) *memResponse {
	w := &memResponse{stream: stream, header: http.Header{}, ready: make(chan struct{})}
	w.cond.L = &w.mu
	return w
}

func (w *memResponse) serve(h http.Handler, r *http.Request) {
	defer func() {
		if p := recover(); p != nil {
			w.mu.Lock()
			w.panicked = p
			w.mu.Unlock()
		}
		w.WriteHeader(http.StatusOK)
		w.finish(io.EOF)
	}()
	h.ServeHTTP(w, r)
}

// response returns the client's response; plain requests have ended by now.
func (w *memResponse) response(req *http.Request) (*http.Response, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.panicked != nil {
		return nil, fmt.Errorf("the API server panicked: %v", w.panicked)
	}
	return &http.Response{
		Status: fmt.Sprintf("%d %s", w.code, http.StatusText(w.code)), StatusCode: w.code,
		Proto: "HTTP/2.0", ProtoMajor: 2, Header: w.sent, Body: w, ContentLength: -1, Request: req,
	}, nil
}

func (w *memResponse) finish(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
	w.cond.Broadcast()
}

func (w *memResponse) Header() http.Header { return w.header }

func (w *memResponse) WriteHeader(code int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.code == 0 {
		w.code, w.sent = code, w.header.Clone()
		close(w.ready)
	}
}

// Write waits while the reader of a stream lags behind.
func (w *memResponse) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.stream && w.buf.Len() > watchBuffer && w.err == nil && !w.closed {
		w.cond.Wait()
	}
	if w.err != nil || w.closed {
		return 0, io.ErrClosedPipe
	}
	w.cond.Broadcast()
	return w.buf.Write(p)
}

func (w *memResponse) Flush() { w.WriteHeader(http.StatusOK) }

// CloseNotify is a method that the API server still requires; it acts on the request's context.
func (w *memResponse) CloseNotify() <-chan bool { return make(chan bool) }

func (w *memResponse) Read(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.buf.Len() == 0 && w.err == nil && !w.closed {
		w.cond.Wait()
	}
	switch {
	case w.closed:
		return 0, http.ErrBodyReadAfterClose
	case w.buf.Len() > 0:
		w.cond.Broadcast()
		n, err := w.buf.Read(p)
		if w.buf.Len() == 0 && w.buf.Cap() > keptBuffer {
			w.buf = bytes.Buffer{}
		}
		return n, err
	default:
		return 0, w.err
	}
}

// Close ends a watch.
func (w *memResponse) Close() error {
	w.mu.Lock()
	w.closed = true
	w.cond.Broadcast()
	w.mu.Unlock()
	w.release()
	return nil
}
