// Package endpoint owns the connections to one sandbox in one epoch of its route, and closes them when it ends. It neither counts requests nor picks a
// sandbox.
//
// With a Verifier, a connection carries nothing until the agent at its address, asked after the connection was open, has
// proved that it is the sandbox's: else a stale route could lead to a Pod that got the address meanwhile.
package endpoint

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/fastpath"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// maxIdle bounds the idle connections to one port.
	maxIdle = 128
	// maxResponseHead bounds the head of a response: a sandbox can have one begun for each of its requests.
	maxResponseHead = 64 << 10
)

// ErrOver is returned for a connection of an epoch that has ended.
var ErrOver = errors.New("sandbox is gone")

// Config is what all endpoints share. All fields but Kept and Verifier are required.
type Config struct {
	Dialer Dialer
	// Kept returns an open connection to the agent of a sandbox, on which it has proved itself, for this endpoint alone; nil, also
	// for the function: there is none.
	Kept func(id sandbox.ID) net.Conn
	// Verifier nil: an address leads to its sandbox.
	Verifier Verifier
	// dialTimeout bounds one attempt to connect; backoff are the waits between attempts.
	DialTimeout time.Duration
	Backoff     []time.Duration
	// agentIdle and serviceIdle close unused connections to the agent and to other ports.
	AgentIdle, ServiceIdle time.Duration
	// continueWait is how long a body that expects "100 Continue" is held back.
	ContinueWait time.Duration
	// dials counts attempts by result.
	Dials *prometheus.CounterVec
}

// Endpoint owns the connections to a sandbox in one epoch, and closes them when it ends.
type Endpoint struct {
	cfg   *Config
	Epoch *route.Epoch
	id    sandbox.ID
	addr  netip.Addr
	fast  *fastpath.Pool
	// token returns the agent's token.
	token func() string

	mu     sync.Mutex
	closed bool // +checklocks:mu
	// conns are idle and in use.
	conns      map[*Conn]struct{}                // +checklocks:mu
	dials      map[*context.CancelFunc]bool      // +checklocks:mu
	transports map[transportKind]*http.Transport // +checklocks:mu
	// responded are the ports that have sent a response.
	responded map[uint16]bool // +checklocks:mu
}

// transportKind distinguishes an epoch's transports: idle timeout and protocol.
type transportKind struct{ agent, grpc bool }

// New returns the endpoint of a route in its epoch. token returns the agent's token.
func New(cfg *Config, r *route.Entry, token func() string) *Endpoint {
	e := &Endpoint{
		cfg: cfg, Epoch: r.Epoch, id: r.ID, addr: r.Address, token: token,
		conns:      map[*Conn]struct{}{},
		dials:      map[*context.CancelFunc]bool{},
		transports: map[transportKind]*http.Transport{},
		responded:  map[uint16]bool{},
	}
	e.fast = fastpath.NewPool(e.idleTimeout)
	return e
}

// At returns the address of a port.
func (e *Endpoint) At(port uint16) string { return netip.AddrPortFrom(e.addr, port).String() }

// Transport returns the epoch's transport for a port.
func (e *Endpoint) Transport(port uint16, grpc bool) *http.Transport {
	kind := transportKind{agent: port == envd.Port, grpc: grpc}
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.transports[kind]; t != nil {
		return t
	}
	t := e.NewTransport()
	t.IdleConnTimeout = e.idleTimeout(port)
	if grpc {
		t.Protocols = &http.Protocols{}
		t.Protocols.SetUnencryptedHTTP2(true)
	}
	t.DialContext = func(ctx context.Context, _, address string) (net.Conn, error) {
		c, err := e.open(ctx, address, grpc)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	e.transports[kind] = t
	return t
}

// Pool implements fastpath.Upstream.
func (e *Endpoint) Pool() *fastpath.Pool { return e.fast }

// Open implements fastpath.Upstream.
func (e *Endpoint) Open(ctx context.Context, port uint16) (fastpath.UpstreamConn, error) {
	c, err := e.Dial(ctx, port)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Dial opens a connection to a port, which the end of the epoch closes.
func (e *Endpoint) Dial(ctx context.Context, port uint16) (*Conn, error) {
	return e.open(ctx, e.At(port), false)
}

func (e *Endpoint) idleTimeout(port uint16) time.Duration {
	if port == envd.Port {
		return e.cfg.AgentIdle
	}
	return e.cfg.ServiceIdle
}

// NewTransport returns a transport that changes nothing in a request.
func (e *Endpoint) NewTransport() *http.Transport {
	return &http.Transport{
		DisableCompression:     true,
		ExpectContinueTimeout:  e.cfg.ContinueWait,
		MaxIdleConnsPerHost:    maxIdle,
		MaxResponseHeaderBytes: maxResponseHead,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: time.Minute},
	}
}

// MarkResponded records that a port sends responses.
func (e *Endpoint) MarkResponded(port uint16) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		e.responded[port] = true
	}
}

// HasResponded reports whether a port has sent a response.
func (e *Endpoint) HasResponded(port uint16) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.responded[port]
}

// Close closes all connections, aborts dials and refuses new ones.
func (e *Endpoint) Close() {
	e.mu.Lock()
	e.closed = true
	conns, dials, transports := e.conns, e.dials, e.transports
	e.conns, e.dials, e.transports = nil, nil, map[transportKind]*http.Transport{}
	e.mu.Unlock()
	for cancel := range dials {
		(*cancel)()
	}
	e.fast.Close()
	for c := range conns {
		_ = c.shut()
	}
	for _, t := range transports {
		t.CloseIdleConnections()
	}
}

// open dials an address of the sandbox. http2 is true if the connection will not carry HTTP/1.1.
func (e *Endpoint) open(ctx context.Context, address string, http2 bool) (*Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil, ErrOver
	}
	e.dials[&cancel] = true
	e.mu.Unlock()
	nc, err := e.dial(ctx, address, http2)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		if err == nil {
			_ = nc.Close() // the epoch has ended
		}
		return nil, ErrOver
	}
	delete(e.dials, &cancel)
	if err != nil {
		return nil, err
	}
	c := newUpstreamConn(nc, e)
	e.conns[c] = struct{}{}
	return c, nil
}

// kept returns an open connection to an address of the agent that can carry a request; nil if there is none.
func (e *Endpoint) kept(address string) net.Conn {
	if e.cfg.Kept == nil || address != e.At(envd.Port) {
		return nil
	}
	nc := e.cfg.Kept(e.id)
	if nc == nil || nc.RemoteAddr().String() == address && newUpstreamConn(nc, e).Alive() {
		return nc
	}
	_ = nc.Close()
	return nil
}

// dial retries a refused port a few times, because it may be about to open.
func (e *Endpoint) dial(ctx context.Context, address string, http2 bool) (net.Conn, error) {
	if !http2 {
		if nc := e.kept(address); nc != nil {
			return nc, nil
		}
	}
	for attempt := 0; ; attempt++ {
		nc, err := e.dialOnce(ctx, address, http2)
		if err == nil {
			e.cfg.Dials.WithLabelValues("ok").Inc()
			return nc, nil
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || attempt >= len(e.cfg.Backoff) {
			if !errors.Is(err, errUnproved) { // counted already
				e.cfg.Dials.WithLabelValues("failed").Inc()
			}
			return nil, err
		}
		select {
		case <-time.After(e.cfg.Backoff[attempt]):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (e *Endpoint) dialOnce(ctx context.Context, address string, http2 bool) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.DialTimeout)
	defer cancel()
	nc, err := e.cfg.Dialer.DialContext(ctx, "tcp", address)
	port := netip.MustParseAddrPort(address).Port()
	if err == nil {
		return e.proved(ctx, nc, port == envd.Port && !http2)
	}
	if port == envd.Port || !errors.Is(err, syscall.ECONNREFUSED) {
		return nil, err
	}
	local, refused := e.dialLocal(ctx, port)
	if refused == nil || errors.Is(refused, errUnproved) {
		return local, refused
	}
	return nil, err
}

// dialLocal connects through the agent to a port that listens on the sandbox's loopback only.
func (e *Endpoint) dialLocal(ctx context.Context, port uint16) (net.Conn, error) {
	agent, err := e.cfg.Dialer.DialContext(ctx, "tcp", e.At(envd.Port))
	if err == nil {
		agent, err = e.proved(ctx, agent, true)
	}
	if err != nil {
		return nil, err
	}
	return envd.ConnectLocal(ctx, agent, e.token(), port)
}

func (e *Endpoint) forget(c *Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.conns, c)
}

// Dialer opens connections to sandboxes; net.Dialer implements it.
type Dialer interface {
	DialContext(ctx context.Context, network, address string) (net.Conn, error)
}
