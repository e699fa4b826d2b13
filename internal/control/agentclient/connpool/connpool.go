// Package connpool keeps one open connection to the agent of each ready member of a warm pool, so that neither its claim nor the first
// request after that opens one. It decides nothing about a sandbox, and sends nothing itself: its Config has what opens a connection and
// what asks an agent on it.
//
// Its lock is held over no request.
package connpool

import (
	"cmp"
	"context"
	"net"
	"sync"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// maxAge bounds the age of a connection that waits for its claim. Agents close what was idle for longer.
	maxAge = 5 * time.Minute
	// maxOpen bounds how many of them there are, and openAtOnce how many are being opened.
	maxOpen    = 1024
	openAtOnce = 4
	// openTimeout bounds the opening of one.
	openTimeout = 2 * time.Second
	// wakeTimeout bounds the answer of an agent that is woken. After it, the claim opens a connection of its own.
	wakeTimeout = 250 * time.Millisecond
)

// Config is what New needs. All fields but OpenTimeout are required.
type Config struct {
	// Open returns a connection to the agent of a sandbox on which it has answered: an agent soon closes one without a request.
	Open func(ctx context.Context, s *agents.Sandbox) (net.Conn, error)
	// Ask has the agent answer a request without content on its connection.
	Ask func(ctx context.Context, conn net.Conn, s *agents.Sandbox) error
	// Opened runs once a connection is kept, with what is left of OpenTimeout.
	Opened func(ctx context.Context, s *agents.Sandbox)
	// OpenTimeout bounds Open and Opened of one connection. Default 2 s.
	OpenTimeout time.Duration
}

// Pool keeps, while Run runs, one connection to each ready member that Observe has shown. Such a connection is given away once, for its
// sandbox and for no other that has its address later. A Pool is safe for concurrent use.
type Pool struct {
	cfg    Config
	wanted chan *agents.Sandbox
	wakes  sync.WaitGroup

	mu      sync.Mutex
	conns   map[sandbox.ID]entry // +checklocks:mu
	running bool                 // +checklocks:mu
}

// entry is a kept connection; conn is nil while it is being opened, or while its agent is woken.
type entry struct {
	conn  net.Conn
	since time.Time
	to    *agents.Sandbox
	over  bool          // the sandbox is no longer a ready member
	woken chan struct{} // closed when the agent has been woken; nil: nothing wakes it
}

// New opens nothing.
func New(cfg Config) *Pool {
	cfg.OpenTimeout = cmp.Or(cfg.OpenTimeout, openTimeout)
	return &Pool{cfg: cfg, wanted: make(chan *agents.Sandbox, maxOpen), conns: map[sandbox.ID]entry{}}
}

// Run opens connections until ctx is done, and closes the remaining ones.
func (p *Pool) Run(ctx context.Context) error {
	p.setRunning(true)
	defer p.wakes.Wait()
	defer p.closeAll()
	defer p.setRunning(false)
	var wg sync.WaitGroup
	defer wg.Wait()
	for range openAtOnce {
		wg.Go(func() {
			for {
				select {
				case s := <-p.wanted:
					p.open(ctx, s)
				case <-ctx.Done():
					return
				}
			}
		})
	}
	tick := time.NewTicker(maxAge / 5)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			p.renew(time.Now())
		case <-ctx.Done():
			return nil
		}
	}
}

// Observe takes a change of any Sandbox: newer is nil when it is gone. It does not block.
func (p *Pool) Observe(older, newer *agents.Sandbox) {
	if newer == nil || !pool.Spare(newer) || len(newer.Status.PodIPs) == 0 {
		if older != nil {
			p.markOver(sandbox.IDOf(older.UID))
		}
		return
	}
	p.mu.Lock()
	id := sandbox.IDOf(newer.UID)
	_, begun := p.conns[id]
	begin := p.running && !begun && len(p.conns) < maxOpen
	if begin {
		p.conns[id] = entry{since: time.Now(), to: newer}
	}
	p.mu.Unlock()
	if begin {
		p.enqueue(newer)
	}
}

// Take returns the connection of a sandbox, which the caller then closes or puts back; nil if there is none.
func (p *Pool) Take(id sandbox.ID) net.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	conn := p.conns[id].conn
	if conn != nil {
		delete(p.conns, id)
	}
	return conn
}

// Put keeps a connection that a claim has used for the first request to its sandbox, which comes soon or not at all.
func (p *Pool) Put(s *agents.Sandbox, conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := sandbox.IDOf(s.UID)
	if _, has := p.conns[id]; has || !p.running {
		_ = conn.Close()
		return
	}
	p.conns[id] = entry{conn: conn, since: time.Now(), to: s, over: true}
}

// Wake has the agent of a ready member answer on its connection, if there is one, and does not wait for that: an agent that has rested
// needs milliseconds for its first answer. Meanwhile Take returns nil, and AwaitWoken waits.
func (p *Pool) Wake(ctx context.Context, s *agents.Sandbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := sandbox.IDOf(s.UID)
	e := p.conns[id]
	if !p.running || e.conn == nil {
		return
	}
	conn, woken := e.conn, make(chan struct{})
	e.conn, e.woken = nil, woken
	p.conns[id] = e
	p.wakes.Go(func() {
		defer close(woken)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), wakeTimeout)
		defer cancel()
		err := p.cfg.Ask(ctx, conn, e.to)
		p.store(e.to, conn, err)
	})
}

// AwaitWoken returns when nothing wakes the agent of a sandbox, or ctx is done.
func (p *Pool) AwaitWoken(ctx context.Context, id sandbox.ID) {
	p.mu.Lock()
	woken := p.conns[id].woken
	p.mu.Unlock()
	if woken == nil {
		return
	}
	select {
	case <-woken:
	case <-ctx.Done():
	}
}

// markOver leaves a connection to a claim in progress; renew closes it otherwise.
func (p *Pool) markOver(id sandbox.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e, ok := p.conns[id]; ok {
		e.over = true
		p.conns[id] = e
	}
}

func (p *Pool) enqueue(s *agents.Sandbox) {
	select {
	case p.wanted <- s:
	default: // its claim opens one
		p.mu.Lock()
		delete(p.conns, sandbox.IDOf(s.UID))
		p.mu.Unlock()
	}
}

func (p *Pool) open(ctx context.Context, s *agents.Sandbox) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.OpenTimeout)
	defer cancel()
	conn, err := p.cfg.Open(ctx, s)
	p.store(s, conn, err)
	if err == nil {
		p.cfg.Opened(ctx, s)
	}
}

// store keeps a connection for its claim, or closes it after an error, or if nothing wants it any more.
func (p *Pool) store(s *agents.Sandbox, conn net.Conn, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := sandbox.IDOf(s.UID)
	e, wanted := p.conns[id]
	if err != nil || !wanted || e.conn != nil {
		if conn != nil {
			_ = conn.Close()
		}
		if e.conn == nil {
			delete(p.conns, id) // its claim opens one
		}
		return
	}
	e.conn, e.since, e.woken = conn, time.Now(), nil
	p.conns[id] = e
}

// renew closes unused connections, and replaces old ones.
func (p *Pool) renew(now time.Time) {
	p.mu.Lock()
	var again []*agents.Sandbox
	for id, e := range p.conns {
		switch {
		case e.over:
			p.closeLocked(id)
		case now.Sub(e.since) >= maxAge:
			p.closeLocked(id)
			p.conns[id] = entry{since: now, to: e.to}
			again = append(again, e.to)
		}
	}
	p.mu.Unlock()
	for _, s := range again {
		p.enqueue(s)
	}
}

func (p *Pool) setRunning(running bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = running
}

func (p *Pool) closeAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.conns {
		p.closeLocked(id)
	}
}

// +checklocks:p.mu
func (p *Pool) closeLocked(id sandbox.ID) {
	if conn := p.conns[id].conn; conn != nil {
		_ = conn.Close()
	}
	delete(p.conns, id)
}
