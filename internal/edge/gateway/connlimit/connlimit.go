// Package connlimit bounds the connections that are open from one client address, and its requests in progress where one
// connection has many, so that one client cannot take all descriptors and all memory of the server.
package connlimit

import (
	"net"
	"net/http"
	"net/netip"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/inflight"
	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
)

// Requests bounds the requests over HTTP/2 that one client address has in progress to most; 0: any number. One more gets
// 429 without a body, which a client that reads nothing could have wait. A request counts until its response is sent. HTTP/1
// has one request for each connection.
func Requests(h http.Handler, most int) http.Handler {
	if most == 0 {
		return h
	}
	var c inflight.Counter[netip.Prefix]
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor < 2 {
			h.ServeHTTP(w, r)
			return
		}
		client := credentials.ClientPrefix(r.RemoteAddr)
		if _, ok := c.Take(client, most); !ok {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		defer c.Release(client)
		h.ServeHTTP(w, r)
		_ = r.Body.Close()                        // what was not read of it takes no memory while the client takes the response
		_ = http.NewResponseController(w).Flush() // net/http would send the end of it afterwards
	})
}

// Listener accepts connections of a listener, and closes those beyond the limit of their client at once.
type Listener struct {
	net.Listener
	most int
	open inflight.Counter[netip.Prefix]
}

// New bounds the connections of one address, or IPv6 network of 64 bits, to most; 0: any number.
func New(l net.Listener, most int) net.Listener {
	if most == 0 {
		return l
	}
	return &Listener{Listener: l, most: most}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		client := credentials.ClientPrefix(c.RemoteAddr().String())
		earlier, ok := l.open.Take(client, l.most)
		if !ok {
			_ = c.Close()
			continue
		}
		release := sync.OnceFunc(func() { l.open.Release(client) })
		if tcp, ok := c.(*net.TCPConn); ok {
			return &counted{tcp, earlier, release}, nil
		}
		return &other{c, earlier, release}, nil
	}
}

// counted is a connection of TCP, with all of its methods.
type counted struct {
	*net.TCPConn
	earlier int
	release func()
}

// Earlier returns how many connections the client had open when it opened this one.
func (c *counted) Earlier() int { return c.earlier }

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.release()
	return c.TCPConn.Close()
}

type other struct {
	net.Conn
	earlier int
	release func()
}

// Earlier is that of counted.
func (c *other) Earlier() int { return c.earlier }

// Close implements net.Conn.
func (c *other) Close() error {
	defer c.release()
	return c.Conn.Close()
}
