package gateway

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
)

// headTime bounds how long a request head may take.
const headTime = 30 * time.Second

// Server serves HTTP/1.1 and HTTP/2 to clients, both over TLS and without. It is net/http's, which
// gets the requests that can be read in one way.
type Server struct {
	http *http.Server
	tls  *tls.Config
}

// NewServer returns a server with the timeouts and protocols that sandbox traffic needs: HTTP/1.1 and
// HTTP/2, which without TLS is spoken by prior knowledge. It has no limit on how long a request
// or a response takes, and closes clients' connections without requests after clientIdle. secure nil
// means plain HTTP; else who speaks that is led to HTTPS. The caller serves and shuts it down.
func NewServer(h http.Handler, log *slog.Logger, clientIdle time.Duration, secure *tls.Config) *Server {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true) // within TLS, too, which net/http does not see
	s := &Server{tls: secure}
	s.http = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c := connOf(r)
			if c.misled {
				leadToTLS(w, r)
				return
			}
			r.TLS = c.state
			h.ServeHTTP(w, r)
		}),
		Protocols:         protocols,
		ReadHeaderTimeout: headTime,
		IdleTimeout:       clientIdle,
		MaxHeaderBytes:    1 << 20,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          1000,
			MaxReceiveBufferPerConnection: 8 << 20,
			MaxReceiveBufferPerStream:     2 << 20,
			SendPingTimeout:               time.Minute,
		},
	}
	return s
}

// Serve serves the listener's connections until the server is shut down or closed.
func (s *Server) Serve(l net.Listener) error { return s.http.Serve(clientListener{l, s.tls}) }

// Shutdown is that of http.Server.
func (s *Server) Shutdown(ctx context.Context) error { return s.http.Shutdown(ctx) }

// Close is that of http.Server.
func (s *Server) Close() error { return s.http.Close() }

// leadToTLS answers a request in plain HTTP at a port for TLS.
func leadToTLS(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Connection", "close")
	openToBrowsers(w.Header())
	if (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Host != "" && httpguts.ValidHostHeader(r.Host) && r.URL.Host == "" {
		http.Redirect(w, r, "https://"+r.Host+r.URL.RequestURI(), http.StatusTemporaryRedirect)
		return
	}
	http.Error(w, "This port speaks HTTPS: send the request to https://"+r.Host, http.StatusBadRequest)
}

// clientListener accepts clientConns.
type clientListener struct {
	net.Listener
	tls *tls.Config
}

// Accept implements net.Listener.
func (l clientListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if _, ours := c.(*clientConn); err != nil || ours {
		return c, err
	}
	return &clientConn{Conn: c, expected: l.tls, messages: messages{h2: true}}, nil
}

// clientConn is a client's connection, as the server of net/http has it. That gets at most one message
// with a read, so that what follows a request is still here when its handler takes the connection
// over; and it gets an error where a message can be read in two ways.
type clientConn struct {
	net.Conn
	expected *tls.Config          // TLS that is to come with the first bytes
	misled   bool                 // and did not
	state    *tls.ConnectionState // nil: no TLS. It is set by the first read
	secure   atomic.Pointer[tls.Conn]

	messages messages
	ahead    []byte // read and not yet passed on

	// For a connection that fell back from the fast path.
	inflight  atomic.Pointer[inflight]
	fallbacks int          // so far
	stay      atomic.Int32 // requests that it still stays for
}

type connKey struct{}

// connOf is the connection of a request; nil where another server has it.
func connOf(r *http.Request) *clientConn {
	c, _ := r.Context().Value(connKey{}).(*clientConn)
	return c
}

// Read implements net.Conn, for one reader at a time.
func (c *clientConn) Read(b []byte) (n int, err error) {
	again := len(c.ahead) > 0
	switch {
	case again:
		n = copy(b, c.ahead)
	case c.messages.at == ended && c.messages.skip == 0:
		return 0, errTwoReadings
	default:
		if n, err = c.receive(b); n == 0 {
			return 0, err
		}
	}
	k, ok := c.messages.take(b[:n])
	switch {
	case !ok && c.messages.skip > 0:
		c.ahead = []byte(brokenTrailer)
	case again:
		c.ahead = c.ahead[k:]
	case k < n:
		c.ahead, err = append([]byte(nil), b[k:n]...), nil
	}
	if k > 0 {
		return k, err
	}
	if c.messages.skip > 0 {
		return c.Read(b)
	}
	return 0, errTwoReadings
}

// receive reads what the client sends, within TLS if there is any.
func (c *clientConn) receive(b []byte) (int, error) {
	if c.expected != nil {
		first := make([]byte, 1)
		if n, err := c.Conn.Read(first); n == 0 {
			return 0, err
		}
		const handshake = 22 // RFC 8446, 5.1
		if c.misled = first[0] != handshake; c.misled {
			c.messages.h2 = false
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

// bare is the connection that bytes of HTTP are read from and written to.
func (c *clientConn) bare() net.Conn {
	if t := c.secure.Load(); t != nil {
		return t
	}
	return c.Conn
}

// Write implements net.Conn.
func (c *clientConn) Write(b []byte) (int, error) { return c.bare().Write(b) }

// Close implements net.Conn.
func (c *clientConn) Close() error { return c.bare().Close() }

// CloseWrite passes to the connection.
func (c *clientConn) CloseWrite() error { return closeWriteOf(c.bare()) }

// begun is a connection of which the first bytes have been read.
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

// hijack takes a request's connection from the server of net/http, with what has been read and not
// used of it.
func hijack(rc *http.ResponseController, r *http.Request) (c net.Conn, ahead []byte, err error) {
	_, buffered, err := rc.Hijack()
	if err != nil {
		return nil, nil, err
	}
	had := connOf(r)
	ahead, _ = buffered.Peek(buffered.Reader.Buffered())
	return had.bare(), append(append([]byte(nil), ahead...), had.ahead...), nil
}
