package gateway

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// maxIdle bounds the unused connections that are kept to one port.
const maxIdle = 128

// errOver says that the life of a route ended, and its connections with it.
var errOver = errors.New("sandbox is gone")

// pool holds all connections of one life. When the life ends, so does every one of them.
type pool struct {
	g    *Gateway
	life *route.Epoch
	at   func(port uint16) string
	// token is the agent's.
	token func() string

	traffic   traffic
	allowance rateLimiter

	mu     sync.Mutex
	closed bool // +checklocks:mu
	// idle and in use
	conns map[*conn]struct{} // +checklocks:mu
	// the last used is the last
	idle  map[uint16][]*conn           // +checklocks:mu
	dials map[*context.CancelFunc]bool // +checklocks:mu
	h2    map[uint16]*h2Upstream       // +checklocks:mu
	sweep *time.Timer                  // +checklocks:mu
}

// poolOf returns the pool of an entry's life.
func (g *Gateway) poolOf(e *route.Entry) *pool {
	if p, ok := g.pools.Load(e.Life); ok {
		return p.(*pool)
	}
	addr, id := e.Address, e.ID
	p := &pool{
		g: g, life: e.Life,
		token: func() string { return g.cfg.Tokens.Agent(id) },
		at:    func(port uint16) string { return addressOf(addr, port) },
		conns: map[*conn]struct{}{},
		idle:  map[uint16][]*conn{},
		dials: map[*context.CancelFunc]bool{},
	}
	p.traffic.last.Store(int64(g.clock()))
	if other, loaded := g.pools.LoadOrStore(e.Life, p); loaded {
		return other.(*pool)
	}
	e.Life.OnEnd(func() {
		g.pools.Delete(p.life)
		p.close()
	})
	return p
}

// acquire returns a connection to a port. It was used before if reused is true; then it was
// alive a moment ago.
func (p *pool) acquire(ctx context.Context, port uint16) (c *conn, reused bool, err error) {
	for {
		c, err := p.pop(port)
		if err != nil {
			return nil, false, err
		}
		if c == nil {
			break
		}
		c.setReadDeadline(time.Time{})
		if c.alive() {
			c.arm()
			return c, true, nil
		}
		c.close()
	}
	c, err = p.open(ctx, port)
	return c, false, err
}

// unused returns a connection to a port that was used before and is alive, with a deadline for
// reading, and not armed. Nil: there is none.
func (p *pool) unused(port uint16, deadline time.Time) *conn {
	for {
		c, err := p.pop(port)
		if c == nil || err != nil {
			return nil
		}
		c.setReadDeadline(deadline)
		if c.alive() {
			return c
		}
		c.close()
	}
}

// ready reports whether a connection to a port is unused.
func (p *pool) ready(port uint16) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.idle[port]) > 0
}

func (p *pool) pop(port uint16) (*conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errOver
	}
	list := p.idle[port]
	if len(list) == 0 {
		return nil, nil //nolint:nilnil // none is idle
	}
	c := list[len(list)-1]
	list[len(list)-1] = nil
	p.idle[port] = list[:len(list)-1]
	return c, nil
}

// release keeps a connection for the next request.
func (p *pool) release(c *conn) {
	if c.br != nil {
		c.disarm()
	}
	p.mu.Lock()
	if _, open := p.conns[c]; !open || len(p.idle[c.port]) >= maxIdle {
		p.mu.Unlock()
		c.close()
		return
	}
	c.idleSince = time.Now()
	p.idle[c.port] = append(p.idle[c.port], c)
	if p.sweep == nil {
		p.sweep = time.AfterFunc(p.idleTimeout(c.port), p.closeIdle)
	}
	p.mu.Unlock()
}

func (p *pool) idleTimeout(port uint16) time.Duration {
	if port == envd.Port {
		return p.g.cfg.AgentIdle
	}
	return p.g.cfg.ServiceIdle
}

// closeIdle closes what has been unused for its time, and comes again if anything is left.
func (p *pool) closeIdle() {
	now := time.Now()
	var old []*conn
	p.mu.Lock()
	next := time.Duration(0)
	for port, list := range p.idle {
		limit, cut := p.idleTimeout(port), 0
		for cut < len(list) && now.Sub(list[cut].idleSince) >= limit {
			cut++
		}
		old = append(old, list[:cut]...)
		if list = append([]*conn(nil), list[cut:]...); len(list) == 0 {
			delete(p.idle, port)
			continue
		}
		p.idle[port] = list
		if wait := limit - now.Sub(list[0].idleSince); next == 0 || wait < next {
			next = wait
		}
	}
	p.sweep = nil
	if next > 0 && !p.closed {
		p.sweep = time.AfterFunc(next, p.closeIdle)
	}
	p.mu.Unlock()
	for _, c := range old {
		c.close()
	}
}

// close ends all connections and attempts to connect, and keeps new ones from beginning.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	conns, dials, h2 := p.conns, p.dials, p.h2
	p.conns, p.dials, p.h2, p.idle = nil, nil, nil, nil
	if p.sweep != nil {
		p.sweep.Stop()
		p.sweep = nil
	}
	p.mu.Unlock()
	for cancel := range dials {
		(*cancel)()
	}
	for c := range conns {
		_ = c.nc.Close() // nothing is to be saved of it
	}
	for _, u := range h2 {
		u.transport.CloseIdleConnections()
	}
}

// open makes a connection. A port that refuses is tried again a few times, for it may be just
// opening; nothing has been sent then.
func (p *pool) open(ctx context.Context, port uint16) (*conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, errOver
	}
	p.dials[&cancel] = true
	p.mu.Unlock()
	nc, err := p.dial(ctx, port)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		if err == nil {
			_ = nc.Close() // of a sandbox that is gone
		}
		return nil, errOver
	}
	delete(p.dials, &cancel)
	if err != nil {
		return nil, err
	}
	c := newConn(nc, p, port)
	c.arm()
	p.conns[c] = struct{}{}
	return c, nil
}

func (p *pool) dial(ctx context.Context, port uint16) (net.Conn, error) {
	for attempt := 0; ; attempt++ {
		nc, err := p.dialOnce(ctx, port)
		if err == nil {
			p.g.metrics.dials.WithLabelValues("ok").Inc()
			return nc, nil
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || attempt >= len(p.g.cfg.DialBackoff) {
			p.g.metrics.dials.WithLabelValues("failed").Inc()
			return nil, err
		}
		select {
		case <-time.After(p.g.cfg.DialBackoff[attempt]):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (p *pool) dialOnce(ctx context.Context, port uint16) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, p.g.cfg.DialTimeout)
	defer cancel()
	nc, err := p.g.cfg.Dialer.DialContext(ctx, "tcp", p.at(port))
	if port == envd.Port || !errors.Is(err, syscall.ECONNREFUSED) {
		return nc, err
	}
	if local, refused := p.dialLocal(ctx, port); refused == nil {
		return local, nil
	}
	return nil, err
}

// dialLocal reaches what listens on the sandbox's own loopback alone: its agent leads there.
func (p *pool) dialLocal(ctx context.Context, port uint16) (net.Conn, error) {
	agent, err := p.g.cfg.Dialer.DialContext(ctx, "tcp", p.at(envd.Port))
	if err != nil {
		return nil, err
	}
	return envd.ConnectLocal(ctx, agent, p.token(), port)
}

func (p *pool) forget(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}
