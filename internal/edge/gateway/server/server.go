// Package server is the server of clients' connections: that of net/http behind a filter for ambiguous requests, with TLS and plain HTTP on one port.
package server

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/edge/gateway/fastpath"
	"github.com/barchan-dev/barchan/internal/edge/gateway/framing"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
)

const (
	// HeadTime bounds how long a request head may take.
	HeadTime = 30 * time.Second
	// maxStay bounds for how many requests a connection stays on the main path.
	maxStay = 64
	// maxHead bounds the head of a request: a client can have one begun on each of its connections.
	maxHead = 64 << 10
	// wideConns is how many connections of a client get wide windows for the bodies of requests over HTTP/2. A window is
	// memory that a client can fill as long as nothing reads the body.
	wideConns = 16
)

// wide and narrow are the windows of HTTP/2: of the first connections of a client, and of its others.
var (
	wide   = http.HTTP2Config{MaxReceiveBufferPerConnection: 8 << 20, MaxReceiveBufferPerStream: 2 << 20}
	narrow = http.HTTP2Config{MaxReceiveBufferPerConnection: 256 << 10, MaxReceiveBufferPerStream: 64 << 10}
)

// Server serves HTTP/1.1 and HTTP/2 to clients, over TLS and without. It is net/http's server behind a
// filter for ambiguous requests; two of them, since one has the same windows for all.
type Server struct {
	wide, narrow *http.Server
	tls          *tls.Config
}

// New returns a server with the timeouts and protocols for sandbox traffic: HTTP/1.1 and HTTP/2,
// without TLS by prior knowledge. It has no limit on the duration of a request or response, and closes
// clients' connections without requests after clientIdle. secure nil means plain HTTP; otherwise plain
// requests are redirected to HTTPS. The caller serves and shuts it down.
func New(h http.Handler, log *slog.Logger, clientIdle time.Duration, secure *tls.Config) *Server {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true) // also within TLS, which net/http does not see
	serve := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := ConnOf(r)
		if c.misled {
			leadToTLS(w, r)
			return
		}
		r.TLS = c.state
		h.ServeHTTP(w, r)
	})
	with := func(windows http.HTTP2Config) *http.Server {
		windows.MaxConcurrentStreams, windows.SendPingTimeout = 1000, time.Minute
		return &http.Server{
			Handler:           serve,
			Protocols:         protocols,
			ReadHeaderTimeout: HeadTime,
			IdleTimeout:       clientIdle,
			MaxHeaderBytes:    maxHead,
			ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
			ConnContext: func(ctx context.Context, c net.Conn) context.Context {
				return context.WithValue(ctx, ConnKey{}, c)
			},
			HTTP2: &windows,
		}
	}
	return &Server{wide: with(wide), narrow: with(narrow), tls: secure}
}

// Serve serves the listener's connections until the server is shut down or closed.
func (s *Server) Serve(l net.Listener) error {
	others := &queue{Listener: l, conns: make(chan net.Conn), done: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.narrow.Serve(others) // it ends with the other one
	}()
	err := s.wide.Serve(clientListener{l, s.tls, others})
	_ = others.Close()
	<-ended
	return err
}

// queue is a listener of connections that another one has accepted.
type queue struct {
	net.Listener // for its address
	conns        chan net.Conn
	done         chan struct{}
	once         sync.Once // closes done
}

// put passes on a connection, and closes it if the queue is closed.
func (q *queue) put(c net.Conn) {
	select {
	case q.conns <- c:
	case <-q.done:
		_ = c.Close()
	}
}

// Accept implements net.Listener.
func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (q *queue) Close() error {
	q.once.Do(func() { close(q.done) })
	return nil
}

// Shutdown is that of http.Server.
func (s *Server) Shutdown(ctx context.Context) error {
	others := make(chan error, 1)
	go func() { others <- s.narrow.Shutdown(ctx) }()
	return errors.Join(s.wide.Shutdown(ctx), <-others)
}

// Close is that of http.Server.
func (s *Server) Close() error { return errors.Join(s.wide.Close(), s.narrow.Close()) }

// OnUnread sets what is called with the request of a resumed connection that closes before the request was read.
func (s *Server) OnUnread(f func(*fastpath.Inflight)) *Server {
	s.wide.ConnState = func(c net.Conn, state http.ConnState) {
		if state != http.StateClosed {
			return
		}
		if u := c.(*Conn).TakeInflight(); u != nil {
			f(u) // it was parsed differently, or not at all
		}
	}
	return s
}

// Resume serves a connection that the fast path gave back. If the server is closed, it closes the connection and
// returns false.
func (s *Server) Resume(c *fastpath.Connection) bool {
	h := &Conn{Conn: c.Conn, ahead: c.Text, state: c.TLS, Fallbacks: c.Fallbacks}
	h.stay.Store(int32(min(1<<min(c.Fallbacks, 10), maxStay))) //nolint:gosec // it is small
	h.inflight.Store(c.Inflight)
	one := &oneConnListener{c: h, at: c.LocalAddr()}
	_ = s.wide.Serve(one) // returns once it has accepted the connection
	if one.c != nil {
		_ = h.Close()
	}
	return one.c == nil
}

// oneConnListener is a listener that accepts one connection.
type oneConnListener struct {
	c  net.Conn
	at net.Addr
}

// Accept implements net.Listener.
func (s *oneConnListener) Accept() (net.Conn, error) {
	c := s.c
	if c == nil {
		return nil, io.EOF
	}
	s.c = nil
	return c, nil
}

// Close implements net.Listener.
func (*oneConnListener) Close() error { return nil }

// Addr implements net.Listener.
func (s *oneConnListener) Addr() net.Addr { return s.at }

// leadToTLS redirects a plain HTTP request on a TLS port.
func leadToTLS(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Connection", "close")
	reply.OpenToBrowsers(w.Header())
	if (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Host != "" && httpguts.ValidHostHeader(r.Host) && r.URL.Host == "" {
		http.Redirect(w, r, "https://"+r.Host+r.URL.RequestURI(), http.StatusTemporaryRedirect)
		return
	}
	http.Error(w, "This port speaks HTTPS: send the request to https://"+r.Host, http.StatusBadRequest)
}

// clientListener accepts Conns, and leaves those beyond wideConns of a client to others.
type clientListener struct {
	net.Listener
	tls    *tls.Config
	others *queue
}

// Accept implements net.Listener.
func (l clientListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		conn := &Conn{Conn: c, expected: l.tls, messages: framing.NewRequests()}
		if counted, ok := c.(interface{ Earlier() int }); !ok || counted.Earlier() < wideConns {
			return conn, nil
		}
		l.others.put(conn)
	}
}

// Conn is a client's connection as the server of net/http reads it. A read returns at most one
// message, so that the bytes after a request are still here when its handler hijacks the connection;
// an ambiguous message is an error.
type Conn struct {
	net.Conn
	expected *tls.Config          // TLS expected with the first bytes
	misled   bool                 // the first bytes were not TLS
	state    *tls.ConnectionState // nil: no TLS. It is set by the first read
	secure   atomic.Pointer[tls.Conn]

	messages framing.Parser
	ahead    []byte // read and not yet passed on

	// For a connection that fell back from the fast path.
	inflight  atomic.Pointer[fastpath.Inflight]
	Fallbacks int          // so far
	stay      atomic.Int32 // requests left before it may move back
}

// ConnKey is the context's key of a connection.
type ConnKey struct{}

// ConnOf returns the connection of a request; nil if another server accepted it.
func ConnOf(r *http.Request) *Conn {
	c, _ := r.Context().Value(ConnKey{}).(*Conn)
	return c
}

// TakeInflight returns, once, the request that the fast path admitted on this connection; nil: none.
func (c *Conn) TakeInflight() *fastpath.Inflight {
	if c == nil {
		return nil
	}
	return c.inflight.Swap(nil)
}

// MustStay counts a request that the fast path could serve. A connection that often falls back stays on the main path
// longer, because each move costs more than a request saves.
func (c *Conn) MustStay() bool { return c.stay.Add(-1) >= 0 }

// Read implements net.Conn, for one reader at a time.
func (c *Conn) Read(b []byte) (n int, err error) {
	again := len(c.ahead) > 0
	switch {
	case again:
		n = copy(b, c.ahead)
	case c.messages.Over():
		return 0, framing.ErrAmbiguous
	default:
		if n, err = c.receive(b); n == 0 {
			return 0, err
		}
	}
	k, ok := c.messages.Take(b[:n])
	switch {
	case !ok && c.messages.Pending():
		c.ahead = []byte(framing.BrokenTrailer)
	case again:
		c.ahead = c.ahead[k:]
	case k < n:
		c.ahead, err = append([]byte(nil), b[k:n]...), nil
	}
	if k > 0 {
		return k, err
	}
	if c.messages.Pending() {
		return c.Read(b)
	}
	return 0, framing.ErrAmbiguous
}

// receive reads what the client sends, within TLS if there is any.
func (c *Conn) receive(b []byte) (int, error) {
	if c.expected != nil {
		first := make([]byte, 1)
		if n, err := c.Conn.Read(first); n == 0 {
			return 0, err
		}
		const handshake = 22 // RFC 8446, 5.1
		if c.misled = first[0] != handshake; c.misled {
			c.messages.RefuseHTTP2()
			c.expected = nil
			return copy(b, first), nil
		}
		c.secure.Store(tls.Server(&begun{c.Conn, first}, c.expected))
		c.expected = nil
	}
	n, err := c.bare().Read(b)
	if t := c.secure.Load(); n > 0 && t != nil && c.state == nil {
		state := t.ConnectionState()
		c.state = &state
	}
	return n, err
}

// bare returns the connection for plaintext HTTP bytes.
func (c *Conn) bare() net.Conn {
	if t := c.secure.Load(); t != nil {
		return t
	}
	return c.Conn
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (int, error) { return c.bare().Write(b) }

// Close implements net.Conn.
func (c *Conn) Close() error { return c.bare().Close() }

// CloseWrite closes the sending side of the connection.
func (c *Conn) CloseWrite() error { return framing.CloseWrite(c.bare()) }

// begun is a connection whose first bytes have been read.
type begun struct {
	net.Conn
	first []byte
}

// Read implements net.Conn.
func (c *begun) Read(b []byte) (int, error) {
	if len(c.first) > 0 {
		n := copy(b, c.first)
		c.first = c.first[n:]
		return n, nil
	}
	return c.Conn.Read(b)
}

// Hijack takes a request's connection from the server of net/http, with the bytes that it read but did
// not use.
func Hijack(rc *http.ResponseController, r *http.Request) (c net.Conn, ahead []byte, err error) {
	_, buffered, err := rc.Hijack()
	if err != nil {
		return nil, nil, err
	}
	had := ConnOf(r)
	ahead, _ = buffered.Peek(buffered.Reader.Buffered())
	return had.bare(), append(append([]byte(nil), ahead...), had.ahead...), nil
}
