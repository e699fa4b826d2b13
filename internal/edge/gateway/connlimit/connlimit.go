// Package connlimit bounds the connections that are open from one client address, so that one client cannot take all
// descriptors of the server.
//
// Its lock is a leaf.
package connlimit

import (
	"net"
	"net/netip"
	"sync"

	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
)

// Listener accepts connections of a listener, and closes those beyond the limit of their client at once.
type Listener struct {
	net.Listener
	most int

	mu   sync.Mutex
	open map[netip.Prefix]int // +checklocks:mu
}

// New bounds the connections of one address, or IPv6 network of 64 bits, to most; 0: any number.
func New(l net.Listener, most int) net.Listener {
	if most == 0 {
		return l
	}
	return &Listener{Listener: l, most: most, open: map[netip.Prefix]int{}}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		client := credentials.ClientPrefix(c.RemoteAddr().String())
		if !l.take(client) {
			_ = c.Close()
			continue
		}
		release := sync.OnceFunc(func() { l.release(client) })
		if tcp, ok := c.(*net.TCPConn); ok {
			return &counted{tcp, release}, nil
		}
		return &other{c, release}, nil
	}
}

func (l *Listener) take(client netip.Prefix) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[client] >= l.most {
		return false
	}
	l.open[client]++
	return true
}

func (l *Listener) release(client netip.Prefix) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[client]--; l.open[client] == 0 {
		delete(l.open, client)
	}
}

// counted is a connection of TCP, with all of its methods.
type counted struct {
	*net.TCPConn
	release func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.release()
	return c.TCPConn.Close()
}

type other struct {
	net.Conn
	release func()
}

// Close implements net.Conn.
func (c *other) Close() error {
	defer c.release()
	return c.Conn.Close()
}
