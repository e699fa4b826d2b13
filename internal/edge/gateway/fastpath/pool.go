package fastpath

import (
	"context"
	"net"
	"sync"
	"time"
)

// maxIdle bounds the idle connections to one port.
const maxIdle = 128

// Upstream is one epoch of a sandbox.
type Upstream interface {
	// Open connects to a port. The connection is closed when the epoch ends.
	Open(ctx context.Context, port uint16) (UpstreamConn, error)
	// Pool returns the epoch's idle connections of the fast path.
	Pool() *Pool
}

// UpstreamConn is a connection to a sandbox.
type UpstreamConn interface {
	net.Conn
	// Alive reports whether the peer has neither closed an idle connection nor sent anything.
	Alive() bool
}

// Pool keeps idle connections of one epoch between requests.
type Pool struct {
	idleTimeout func(port uint16) time.Duration

	mu     sync.Mutex
	closed bool // +checklocks:mu
	// idle has the most recently used connection last.
	idle  map[uint16][]idleConn // +checklocks:mu
	sweep *time.Timer           // +checklocks:mu
}

type idleConn struct {
	UpstreamConn
	since time.Time
}

// NewPool returns an empty pool.
func NewPool(idleTimeout func(port uint16) time.Duration) *Pool {
	return &Pool{idleTimeout: idleTimeout, idle: map[uint16][]idleConn{}}
}

// Get returns a live idle connection, or nil.
func (p *Pool) Get(port uint16) UpstreamConn {
	for {
		c, ok := p.pop(port)
		if !ok {
			return nil
		}
		if time.Since(c.since) < p.idleTimeout(port) && c.Alive() {
			return c.UpstreamConn
		}
		_ = c.Close()
	}
}

func (p *Pool) pop(port uint16) (c idleConn, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.idle[port]
	if len(list) == 0 {
		return idleConn{}, false
	}
	c = list[len(list)-1]
	list[len(list)-1] = idleConn{}
	p.idle[port] = list[:len(list)-1]
	return c, true
}

// Put adds a connection for a later request.
func (p *Pool) Put(port uint16, c UpstreamConn) {
	p.mu.Lock()
	kept := !p.closed && len(p.idle[port]) < maxIdle
	if kept {
		p.idle[port] = append(p.idle[port], idleConn{c, time.Now()})
		if p.sweep == nil {
			p.sweep = time.AfterFunc(p.idleTimeout(port), p.closeIdle)
		}
	}
	p.mu.Unlock()
	if !kept {
		_ = c.Close()
	}
}

// closeIdle closes the connections past the idle timeout, and schedules itself for the rest.
func (p *Pool) closeIdle() {
	now := time.Now()
	var old []idleConn
	p.mu.Lock()
	next := time.Duration(0)
	for port, list := range p.idle {
		limit, cut := p.idleTimeout(port), 0
		for cut < len(list) && now.Sub(list[cut].since) >= limit {
			cut++
		}
		old = append(old, list[:cut]...)
		if list = append([]idleConn(nil), list[cut:]...); len(list) == 0 {
			delete(p.idle, port)
			continue
		}
		p.idle[port] = list
		if wait := limit - now.Sub(list[0].since); next == 0 || wait < next {
			next = wait
		}
	}
	p.sweep = nil
	if next > 0 && !p.closed {
		p.sweep = time.AfterFunc(next, p.closeIdle)
	}
	p.mu.Unlock()
	for _, c := range old {
		_ = c.Close()
	}
}

// Close empties the pool and refuses more. The epoch's owner closes the connections.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed, p.idle = true, map[uint16][]idleConn{}
	if p.sweep != nil {
		p.sweep.Stop()
		p.sweep = nil
	}
}
