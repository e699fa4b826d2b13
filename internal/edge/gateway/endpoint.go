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

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/edge/gateway/fastpath"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// maxIdle bounds the idle connections to one port.
	maxIdle = 128
	// maxResponseHead bounds the head of a response.
	maxResponseHead = 1 << 20
)

// errOver is returned for a connection of an epoch that has ended.
var errOver = errors.New("sandbox is gone")

// endpointConfig is what all endpoints share. All fields are required.
type endpointConfig struct {
	dialer Dialer
	// dialTimeout bounds one attempt to connect; backoff are the waits between attempts.
	dialTimeout time.Duration
	backoff     []time.Duration
	// agentIdle and serviceIdle close unused connections to the agent and to other ports.
	agentIdle, serviceIdle time.Duration
	// continueWait is how long a body that expects "100 Continue" is held back.
	continueWait time.Duration
	// dials counts attempts by result.
	dials *prometheus.CounterVec
}

// endpoint owns the connections to a sandbox in one epoch, and closes them when it ends.
type endpoint struct {
	cfg   *endpointConfig
	epoch *route.Epoch
	addr  netip.Addr
	fast  *fastpath.Pool
	// token returns the agent's token.
	token func() string

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

// newEndpoint returns the endpoint of an epoch at an address. token returns the agent's token.
func newEndpoint(cfg *endpointConfig, epoch *route.Epoch, addr netip.Addr, token func() string) *endpoint {
	u := &endpoint{
		cfg: cfg, epoch: epoch, addr: addr, token: token,
		conns:      map[*upstreamConn]struct{}{},
		dials:      map[*context.CancelFunc]bool{},
		transports: map[transportKind]*http.Transport{},
		responded:  map[uint16]bool{},
	}
	u.fast = fastpath.NewPool(u.idleTimeout)
	return u
}

// at returns the address of a port.
func (u *endpoint) at(port uint16) string { return netip.AddrPortFrom(u.addr, port).String() }

// transport returns the epoch's transport for a port.
func (u *endpoint) transport(port uint16, grpc bool) *http.Transport {
	kind := transportKind{agent: port == envd.Port, grpc: grpc}
	u.mu.Lock()
	defer u.mu.Unlock()
	if t := u.transports[kind]; t != nil {
		return t
	}
	t := u.newTransport()
	t.IdleConnTimeout = u.idleTimeout(port)
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
func (u *endpoint) Pool() *fastpath.Pool { return u.fast }

// Open implements fastpath.Upstream.
func (u *endpoint) Open(ctx context.Context, port uint16) (fastpath.UpstreamConn, error) {
	c, err := u.open(ctx, u.at(port))
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (u *endpoint) idleTimeout(port uint16) time.Duration {
	if port == envd.Port {
		return u.cfg.agentIdle
	}
	return u.cfg.serviceIdle
}

// newTransport returns a transport that changes nothing in a request.
func (u *endpoint) newTransport() *http.Transport {
	return &http.Transport{
		DisableCompression:     true,
		ExpectContinueTimeout:  u.cfg.continueWait,
		MaxIdleConnsPerHost:    maxIdle,
		MaxResponseHeaderBytes: maxResponseHead,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: time.Minute},
	}
}

// markResponded records that a port sends responses.
func (u *endpoint) markResponded(port uint16) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.closed {
		u.responded[port] = true
	}
}

// hasResponded reports whether a port has sent a response.
func (u *endpoint) hasResponded(port uint16) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.responded[port]
}

// close closes all connections, aborts dials and refuses new ones.
func (u *endpoint) close() {
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
func (u *endpoint) open(ctx context.Context, address string) (*upstreamConn, error) {
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
func (u *endpoint) dial(ctx context.Context, address string) (net.Conn, error) {
	for attempt := 0; ; attempt++ {
		nc, err := u.dialOnce(ctx, address)
		if err == nil {
			u.cfg.dials.WithLabelValues("ok").Inc()
			return nc, nil
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || attempt >= len(u.cfg.backoff) {
			u.cfg.dials.WithLabelValues("failed").Inc()
			return nil, err
		}
		select {
		case <-time.After(u.cfg.backoff[attempt]):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (u *endpoint) dialOnce(ctx context.Context, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, u.cfg.dialTimeout)
	defer cancel()
	nc, err := u.cfg.dialer.DialContext(ctx, "tcp", address)
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
func (u *endpoint) dialLocal(ctx context.Context, port uint16) (net.Conn, error) {
	agent, err := u.cfg.dialer.DialContext(ctx, "tcp", u.at(envd.Port))
	if err != nil {
		return nil, err
	}
	return envd.ConnectLocal(ctx, agent, u.token(), port)
}

func (u *endpoint) forget(c *upstreamConn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.conns, c)
}

// Dialer opens connections to sandboxes; net.Dialer implements it.
type Dialer interface {
	DialContext(ctx context.Context, network, address string) (net.Conn, error)
}
