package gateway

import (
	"io"
	"net"
	"net/http"
	"time"
)

// mustStay counts a request that could be a lane's. The one that a lane would not carry stays in
// any case. The oftener a connection has been handed over, which costs more than it saves, the longer
// it stays.
func (c *clientConn) mustStay() bool { return c.stay.Add(-1) >= 0 }

// newBack makes the server that takes connections over from lanes.
func (g *Gateway) newBack() *Server {
	s := g.Server(nil)
	s.http.ConnState = func(c net.Conn, state http.ConnState) {
		if state != http.StateClosed {
			return
		}
		if u := c.(*clientConn).underway.Swap(nil); u != nil {
			u.drop() // the request was read otherwise, or not at all
		}
	}
	return s
}

// fallBack has the server of net/http go on with the connection. text is what has been read of it,
// from the beginning of a request; u is that request, if it has begun.
func (l *fastConn) fallBack(text []byte, u *inflightRequest) {
	l.g.fastConns.given.Add(1)
	_ = l.nc.SetReadDeadline(time.Time{})
	h := &clientConn{Conn: l.nc, ahead: append([]byte(nil), text...), state: l.secure, times: l.handed}
	h.stay.Store(int32(min(1<<min(l.handed, 10), maxStay))) //nolint:gosec // it is small
	if u != nil {
		u.conn.setReadDeadline(time.Time{})
		h.underway.Store(u)
	}
	pages.Put(l.page)
	l.page = nil
	s := &oneConnListener{c: h, at: l.nc.LocalAddr()}
	_ = l.g.back.Serve(s) // it ends when it has the connection
	if s.c != nil {       // it was closed before
		_ = h.Close()
		if u != nil {
			u.drop()
		}
	}
	l.g.fastConns.remove(l)
}

// oneConnListener is a listener that has one connection to accept.
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
