// Package fastpath proxies simple requests to running sandboxes without net/http: the common case, at
// a fraction of its cost. A connection that the gateway hands over stays here while it carries only
// HTTP/1.1 requests and responses in their simplest form, each of which fits in 16 KiB and is
// complete in a few milliseconds.
//
// It makes no decisions and sends no local replies. Everything else falls back to the main path
// (Gateway.Fallback): the connection, the bytes read, and the connection to the sandbox if the request
// was sent. The main path works without this package.
//
// Locks: Path.mu and Pool.mu are not held together, nor over a call.
package fastpath

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Gateway is the main path.
type Gateway interface {
	// Bind returns the target of a host and headers. False: the main path must decide.
	Bind(host, sandboxID, sandboxPort string) (Target, bool)
	// Admit checks and counts a request. False: it was not counted, and the main path must decide.
	Admit(x *Exchange) (Upstream, bool)
	// Done ends a request that was admitted and got its whole response.
	Done(ctx context.Context, x *Exchange)
	// Fallback serves a connection from here on.
	Fallback(c *Connection)
}

// Target is the destination of a request.
type Target struct {
	ID   sandbox.ID
	Port uint16
	// Host is the Host header for the sandbox.
	Host string
}

// Connection is a client's connection that falls back.
type Connection struct {
	net.Conn
	// Text is what was read of it, from the beginning of a request.
	Text []byte
	// TLS is nil without it.
	TLS *tls.ConnectionState
	// Remote is the client's address and port.
	Remote string
	// Fallbacks counts how often the connection fell back.
	Fallbacks int
	// Inflight is the request in Text, if it was admitted.
	Inflight *Inflight
}

// Inflight is an admitted request that the main path must complete.
type Inflight struct {
	Target   Target
	Upstream Upstream
	// Conn is the connection on which it was sent; nil: it was not sent.
	Conn UpstreamConn
	// Ahead is what was read of the response.
	Ahead   []byte
	Started time.Time
}

// Config configures a path. All fields are required.
type Config struct {
	Gateway Gateway
	Log     *slog.Logger
	// ClientIdle closes clients' connections without requests.
	ClientIdle time.Duration
	// ResponseTime bounds the wait for a whole response.
	ResponseTime time.Duration
	// HeadTime bounds how long the rest of a head may take.
	HeadTime time.Duration
}

// ResponseTime is the usual Config.ResponseTime. A client that disconnects meanwhile is not noticed.
const ResponseTime = 50 * time.Millisecond

// Path owns the client connections on the fast path. Make one with New.
type Path struct {
	cfg       Config
	born      time.Time
	closed    atomic.Bool
	fallbacks atomic.Int64

	mu sync.Mutex
	// conns maps to the client's connections; nil: not taken over yet.
	conns map[*conn]net.Conn // +checklocks:mu
	// none is closed when the last connection has ended and no more may begin.
	none chan struct{} // +checklocks:mu
}

// New returns a path. It starts nothing.
func New(cfg Config) *Path { return &Path{cfg: cfg, born: time.Now(), conns: map[*conn]net.Conn{}} }

// Start takes over the connection of a request without a body, if the request is simple; to is its
// target. take returns the connection, with what was read after the request. False: nothing was taken,
// and the main path continues.
func (p *Path) Start(ctx context.Context, r *http.Request, to Target, fallbacks int, take func() (net.Conn, []byte, error)) bool {
	c, text := p.connFor(r, to, fallbacks)
	if c == nil {
		return false
	}
	nc, ahead, err := take()
	if err != nil {
		pages.Put(c.page)
		p.remove(c)
		return false
	}
	c.nc, c.in = nc, newSource(nc, c.space, c.unspace)
	p.connected(c, nc)
	if len(text)+len(ahead) > pageSize {
		c.fallBack(slices.Concat(text, ahead), nil)
		return true
	}
	c.w = len(text) + copy(c.page[len(text):], ahead)
	go c.run(ctx) // Drain waits for it
	return true
}

// connFor returns a connection whose page holds the request, and its text there, or nil.
func (p *Path) connFor(r *http.Request, to Target, fallbacks int) (*conn, []byte) {
	ip, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil || r.ProtoMajor != 1 || !r.ProtoAtLeast(1, 1) || r.Close || r.ContentLength != 0 {
		return nil, nil
	}
	c := &conn{p: p, remote: r.RemoteAddr, ip: ip, secure: r.TLS, page: pages.Get().(*[pageSize]byte), fallbacks: fallbacks}
	text := appendRequest(c.page[:0], r)
	simple := len(text) <= pageSize/2 && c.request.parse(text) == complete && c.bind(&c.request)
	if b := &c.bound.target; !simple || b.ID != to.ID || b.Port != to.Port || !p.add(c) {
		pages.Put(c.page)
		return nil, nil
	}
	return c, text
}

// add reports false while draining.
func (p *Path) add(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.none != nil {
		return false
	}
	p.conns[c] = nil
	return true
}

// connected records a connection to a client, which Drain closes from here on.
func (p *Path) connected(c *conn, nc net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = nc
}

func (p *Path) remove(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
	if p.none != nil && len(p.conns) == 0 {
		close(p.none)
	}
}

// Drain closes the connections that wait for a request; the others end after theirs. The returned
// channel is closed when all have ended. With abort it closes all at once.
func (p *Path) Drain(abort bool) <-chan struct{} {
	p.closed.Store(true)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.none == nil {
		p.none = make(chan struct{})
		if len(p.conns) == 0 {
			close(p.none)
		}
	}
	for c, nc := range p.conns {
		if nc != nil && (abort || c.idle.Load()) {
			_ = nc.Close() // its reader gets an error
		}
	}
	return p.none
}

// Stats returns the connections on the fast path, those of them that wait for a request, and how
// often one fell back.
func (p *Path) Stats() (conns, idle int, fallbacks int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		if c.idle.Load() {
			idle++
		}
	}
	return len(p.conns), idle, p.fallbacks.Load()
}

// clock is the time since the path was made. Unlike the machine's, it does not jump.
func (p *Path) clock() time.Duration { return time.Since(p.born) }
