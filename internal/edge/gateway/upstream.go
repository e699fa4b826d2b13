package gateway

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/edge/gateway/fastpath"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// maxIdle bounds the idle connections to one port.
	maxIdle = 128
	// maxResponseHead bounds the head of a response.
	maxResponseHead = 1 << 20
	// continueWait is the default of Config's.
	continueWait = time.Second
)

// errOver is returned for a connection of an epoch that has ended.
var errOver = errors.New("sandbox is gone")

// upstream owns the connections of one epoch and closes them when it ends.
type upstream struct {
	g     *Gateway
	epoch *route.Epoch
	entry *route.Entry // the first entry of the epoch
	fast  *fastpath.Pool
	at    func(port uint16) string
	// token returns the agent's token.
	token func() string

	traffic   traffic
	allowance rateLimiter

	mu     sync.Mutex
	closed bool // +checklocks:mu
	// conns are idle and in use.
	conns      map[*upstreamConn]struct{}        // +checklocks:mu
	dials      map[*context.CancelFunc]bool      // +checklocks:mu
	transports map[transportKind]*http.Transport // +checklocks:mu
	// responded are the ports that have sent a response.
	responded map[uint16]bool // +checklocks:mu
}

// transportKind distinguishes an epoch's transports: idle timeout and protocol.
type transportKind struct{ agent, grpc bool }

// upstreamOf returns the upstream of an entry's epoch.
func (g *Gateway) upstreamOf(e *route.Entry) *upstream {
	if u, ok := g.upstreams.Load(e.Epoch); ok {
		return u.(*upstream)
	}
	addr, id := e.Address, e.ID
	u := &upstream{
		g: g, epoch: e.Epoch, entry: e, fast: fastpath.NewPool(g.idleTimeout),
		token:      func() string { return g.cfg.Tokens.Agent(id) },
		at:         func(port uint16) string { return addressOf(addr, port) },
		conns:      map[*upstreamConn]struct{}{},
		dials:      map[*context.CancelFunc]bool{},
		transports: map[transportKind]*http.Transport{},
		responded:  map[uint16]bool{},
	}
	u.traffic.last.Store(int64(g.clock()))
	if other, loaded := g.upstreams.LoadOrStore(e.Epoch, u); loaded {
		return other.(*upstream)
	}
	e.Epoch.OnEnd(func() {
		g.upstreams.Delete(u.epoch)
		u.close()
	})
	return u
}

// transport returns the epoch's transport for a port.
func (u *upstream) transport(port uint16, grpc bool) *http.Transport {
	kind := transportKind{agent: port == envd.Port, grpc: grpc}
	u.mu.Lock()
	defer u.mu.Unlock()
	if t := u.transports[kind]; t != nil {
		return t
	}
	t := u.g.newTransport()
	t.IdleConnTimeout = u.g.idleTimeout(port)
	if grpc {
		t.Protocols = &http.Protocols{}
		t.Protocols.SetUnencryptedHTTP2(true)
	}
	t.DialContext = func(ctx context.Context, _, address string) (net.Conn, error) {
		c, err := u.open(ctx, address)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	u.transports[kind] = t
	return t
}

// Pool implements fastpath.Upstream.
func (u *upstream) Pool() *fastpath.Pool { return u.fast }

// Open implements fastpath.Upstream.
func (u *upstream) Open(ctx context.Context, port uint16) (fastpath.UpstreamConn, error) {
	c, err := u.open(ctx, u.at(port))
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (g *Gateway) idleTimeout(port uint16) time.Duration {
	if port == envd.Port {
		return g.cfg.AgentIdle
	}
	return g.cfg.ServiceIdle
}

// newTransport returns a transport that changes nothing in a request.
func (g *Gateway) newTransport() *http.Transport {
	return &http.Transport{
		DisableCompression:     true,
		ExpectContinueTimeout:  g.cfg.continueWait,
		MaxIdleConnsPerHost:    maxIdle,
		MaxResponseHeaderBytes: maxResponseHead,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: time.Minute},
	}
}

// markResponded records that a port sends responses.
func (u *upstream) markResponded(port uint16) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.closed {
		u.responded[port] = true
	}
}

// hasResponded reports whether a port has sent a response.
func (u *upstream) hasResponded(port uint16) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.responded[port]
}

// close closes all connections, aborts dials and refuses new ones.
func (u *upstream) close() {
	u.mu.Lock()
	u.closed = true
	conns, dials, transports := u.conns, u.dials, u.transports
	u.conns, u.dials, u.transports = nil, nil, map[transportKind]*http.Transport{}
	u.mu.Unlock()
	for cancel := range dials {
		(*cancel)()
	}
	u.fast.Close()
	for c := range conns {
		_ = c.shut()
	}
	for _, t := range transports {
		t.CloseIdleConnections()
	}
}

// open dials an address of the sandbox.
func (u *upstream) open(ctx context.Context, address string) (*upstreamConn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	u.mu.Lock()
	if u.closed {
		u.mu.Unlock()
		return nil, errOver
	}
	u.dials[&cancel] = true
	u.mu.Unlock()
	nc, err := u.dial(ctx, address)
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed {
		if err == nil {
			_ = nc.Close() // the epoch has ended
		}
		return nil, errOver
	}
	delete(u.dials, &cancel)
	if err != nil {
		return nil, err
	}
	c := newUpstreamConn(nc, u)
	u.conns[c] = struct{}{}
	return c, nil
}

// dial retries a refused port a few times, because it may be about to open.
func (u *upstream) dial(ctx context.Context, address string) (net.Conn, error) {
	for attempt := 0; ; attempt++ {
		nc, err := u.dialOnce(ctx, address)
		if err == nil {
			u.g.metrics.dials.WithLabelValues("ok").Inc()
			return nc, nil
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || attempt >= len(u.g.cfg.DialBackoff) {
			u.g.metrics.dials.WithLabelValues("failed").Inc()
			return nil, err
		}
		select {
		case <-time.After(u.g.cfg.DialBackoff[attempt]):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (u *upstream) dialOnce(ctx context.Context, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, u.g.cfg.DialTimeout)
	defer cancel()
	nc, err := u.g.cfg.Dialer.DialContext(ctx, "tcp", address)
	port := netip.MustParseAddrPort(address).Port()
	if port == envd.Port || !errors.Is(err, syscall.ECONNREFUSED) {
		return nc, err
	}
	if local, refused := u.dialLocal(ctx, port); refused == nil {
		return local, nil
	}
	return nil, err
}

// dialLocal connects through the agent to a port that listens on the sandbox's loopback only.
func (u *upstream) dialLocal(ctx context.Context, port uint16) (net.Conn, error) {
	agent, err := u.g.cfg.Dialer.DialContext(ctx, "tcp", u.at(envd.Port))
	if err != nil {
		return nil, err
	}
	return envd.ConnectLocal(ctx, agent, u.token(), port)
}

func (u *upstream) forget(c *upstreamConn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.conns, c)
}
