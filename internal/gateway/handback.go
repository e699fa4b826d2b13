package gateway

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// handed is a connection that a lane has given to the server of net/http, with what was read of it.
type handed struct {
	net.Conn
	ahead    []byte // the server's to read, which has one reader at a time
	secure   *tls.ConnectionState
	underway atomic.Pointer[underway]
	times    int          // that it has been handed over so far
	stay     atomic.Int32 // how many requests more it stays where it is
}

type handedKey struct{}

// handedOf is the handed connection of a request; nil: it is none.
func handedOf(r *http.Request) *handed {
	h, _ := r.Context().Value(handedKey{}).(*handed)
	return h
}

// mustStay counts a request that could be a lane's. The one that a lane would not carry stays in
// any case. The oftener a connection has been handed over, which costs more than it saves, the longer
// it stays.
func (h *handed) mustStay() bool { return h.stay.Add(-1) >= 0 }

// Read implements net.Conn.
func (h *handed) Read(b []byte) (int, error) {
	if len(h.ahead) > 0 {
		n := copy(b, h.ahead)
		h.ahead = h.ahead[n:]
		return n, nil
	}
	return h.Conn.Read(b)
}

// CloseWrite passes to the connection.
func (h *handed) CloseWrite() error { return closeWriteOf(h.Conn) }

// newBack makes the server that takes connections over from lanes.
func (g *Gateway) newBack() *http.Server {
	s := NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.TLS = handedOf(r).secure
		g.ServeHTTP(w, r)
	}), g.log, g.cfg.ClientIdle)
	s.Protocols = &http.Protocols{}
	s.Protocols.SetHTTP1(true)
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, handedKey{}, c)
	}
	s.ConnState = func(c net.Conn, state http.ConnState) {
		if state != http.StateClosed {
			return
		}
		if u := c.(*handed).underway.Swap(nil); u != nil {
			u.drop() // the request was read otherwise, or not at all
		}
	}
	return s
}

// giveBack has the server of net/http go on with the connection. text is what has been read of it,
// from the beginning of a request; u is that request, if it has begun.
func (l *lane) giveBack(text []byte, u *underway) {
	l.g.lanes.given.Add(1)
	_ = l.nc.SetReadDeadline(time.Time{})
	h := &handed{Conn: l.nc, ahead: append([]byte(nil), text...), secure: l.secure, times: l.handed}
	h.stay.Store(int32(min(1<<min(l.handed, 10), maxStay))) //nolint:gosec // it is small
	if u != nil {
		u.conn.hurry(time.Time{})
		h.underway.Store(u)
	}
	pages.Put(l.page)
	l.page = nil
	s := &single{c: h, at: l.nc.LocalAddr()}
	_ = l.g.back.Serve(s) // it ends when it has the connection
	if s.c != nil {       // it was closed before
		_ = h.Close()
		if u != nil {
			u.drop()
		}
	}
	l.g.lanes.remove(l)
}

// single is a listener that has one connection to accept.
type single struct {
	c  net.Conn
	at net.Addr
}

// Accept implements net.Listener.
func (s *single) Accept() (net.Conn, error) {
	c := s.c
	if c == nil {
		return nil, io.EOF
	}
	s.c = nil
	return c, nil
}

// Close implements net.Listener.
func (*single) Close() error { return nil }

// Addr implements net.Listener.
func (s *single) Addr() net.Addr { return s.at }
