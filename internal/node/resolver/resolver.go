// Package resolver is the DNS server of sandboxes. It forwards questions to the operator's servers,
// within limits. For a sandbox whose policy allows names, it answers those only, and first pins
// their addresses: they are reachable for that sandbox as long as the response is valid. It caches
// nothing, and is the only user of the DNS library.
package resolver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/egress"
)

const (
	// questionTimeout bounds the work on one question, upstreamTimeout each server's part of it:
	// the defaults of Config. Clients retry after 5 s.
	questionTimeout = 4500 * time.Millisecond
	upstreamTimeout = 2 * time.Second
	// maxQuestions bounds the concurrent questions, and maxPerClient those of one sandbox, which also has at most one for
	// maxShare that are free: a hundred sandboxes that ask for what answers late leave some to others. More are
	// dropped. The same limits apply to open connections.
	maxQuestions = 4096
	maxPerClient = 128
	maxShare     = 16
	// messageSize is the largest UDP response that networks do not fragment.
	messageSize = 1232
	// listenRetry is the pause before another attempt to listen.
	listenRetry = 5 * time.Second
	// minPin is the least time that an address is pinned, even if the response expires earlier:
	// programs keep addresses too long. maxPin is the most; responses expire no later.
	minPin = 10 * time.Minute
	maxPin = 24 * time.Hour
)

// Sandboxes has the policies of clients; package netdev implements it.
type Sandboxes interface {
	// EgressOf returns the policy of the sandbox with an address.
	EgressOf(source netip.Addr) egress.Policy
	// Pin makes addresses of a name reachable for the sandbox with an address, and returns the ones
	// that it may reach. A name that is not allowed is an errs.ErrForbidden.
	Pin(ctx context.Context, source netip.Addr, name string, addrs []netip.Addr, keep time.Duration) ([]netip.Addr, error)
}

// Config configures a Resolver; every field is required except Internal and Metrics.
type Config struct {
	// Listen are the addresses to serve, over UDP and TCP.
	Listen []netip.AddrPort
	// Clients are the ranges that get responses; others get none.
	Clients []netip.Prefix
	// Upstreams are the servers to query, the best first.
	Upstreams []netip.AddrPort
	Sandboxes Sandboxes
	Internal  Internal // optional
	Log       *slog.Logger
	Metrics   prometheus.Registerer

	// For tests.
	questionTime, upstreamTime time.Duration
}

// Resolver answers questions while Run runs. It is safe for concurrent use.
type Resolver struct {
	cfg  Config
	log  *slog.Logger
	good atomic.Int32 // the last upstream that responded

	*metrics

	mu     sync.Mutex
	total  int                // +checklocks:mu
	active map[netip.Addr]int // +checklocks:mu
}

// Results of questions, as in the metric.
const (
	answered = "answered"
	blocked  = "blocked"
	refused  = "refused"
	failed   = "failed"
	dropped  = "dropped"
)

type metrics struct {
	results  *prometheus.CounterVec
	duration prometheus.Histogram
}

// Metrics registers the metrics of a resolver without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to)
	return err
}

func newMetrics(to prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: "resolver", Name: "questions_total",
			Help: "DNS questions of sandboxes, by result. `blocked`: the egress policy forbids the name or address; `refused`: not a question that is answered; `failed`: no DNS server answered; `dropped`: too many questions at once.",
		}, []string{"result"}),
		duration: prometheus.NewHistogram(telemetry.DurationOpts("resolver", "upstream", "Response time of the DNS servers that questions of sandboxes are forwarded to.")),
	}
	for _, result := range []string{answered, blocked, refused, failed, dropped} {
		m.results.WithLabelValues(result) // zero, not absent
	}
	return m, telemetry.Register(to, m.results, m.duration)
}

// New checks the configuration and starts nothing.
func New(cfg Config) (*Resolver, error) {
	if len(cfg.Upstreams) == 0 || cfg.Sandboxes == nil || cfg.Log == nil {
		return nil, fmt.Errorf("resolver: upstreams, sandboxes and logger required: %w", errs.ErrInvalid)
	}
	cfg.questionTime = cmp.Or(cfg.questionTime, questionTimeout)
	cfg.upstreamTime = cmp.Or(cfg.upstreamTime, upstreamTimeout)
	m, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, fmt.Errorf("resolver: %w", err)
	}
	return &Resolver{cfg: cfg, log: cfg.Log.With("component", "resolver"), active: map[netip.Addr]int{}, metrics: m}, nil
}

// Run serves until ctx is done. If it cannot listen, because another server has the port or an
// address is missing, it logs that and retries.
func (r *Resolver) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	for _, at := range r.cfg.Listen {
		for _, network := range []string{"udp", "tcp"} {
			running.Go(func() { r.serve(ctx, network, at) })
		}
	}
	<-ctx.Done()
	return nil
}

// serve serves one address, over one protocol, until ctx is done.
func (r *Resolver) serve(ctx context.Context, network string, at netip.AddrPort) {
	for logged := false; ctx.Err() == nil; {
		began := time.Now()
		err := r.serveOnce(ctx, network, at)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > listenRetry {
			logged = false
		}
		if !logged {
			r.log.WarnContext(ctx, "DNS server for sandboxes cannot listen, retrying", telemetry.Address, at, "network", network, telemetry.Error, err)
		}
		logged = true
		select {
		case <-time.After(listenRetry):
		case <-ctx.Done():
		}
	}
}

func (r *Resolver) serveOnce(ctx context.Context, network string, at netip.AddrPort) error {
	server := &dns.Server{
		Net: network, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) { r.handle(ctx, w, q) }),
		UDPSize: messageSize, MaxTCPQueries: maxPerClient,
	}
	listen := net.ListenConfig{Control: freeBind}
	var err error
	if network == "udp" {
		server.PacketConn, err = listen.ListenPacket(ctx, "udp", at.String())
	} else if server.Listener, err = listen.Listen(ctx, "tcp", at.String()); err == nil {
		server.Listener = &limitedListener{Listener: server.Listener, r: r}
	}
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- server.ActivateAndServe() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	// If it has not started yet, it ends with its socket.
	_ = server.Shutdown()
	if server.PacketConn != nil {
		_ = server.PacketConn.Close()
	} else {
		_ = server.Listener.Close()
	}
	if err := <-ended; err != nil {
		r.log.DebugContext(ctx, "DNS server for sandboxes ended", telemetry.Address, at, "network", network, telemetry.Error, err)
	}
	return nil
}

// freeBind lets a socket bind to an address before the host has it.
func freeBind(_, _ string, c syscall.RawConn) error {
	var set error
	err := c.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_FREEBIND, 1) })
	return errors.Join(err, set)
}

// admit counts a question or a connection of a client, and reports whether to serve it.
func (r *Resolver) admit(client netip.Addr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.active[client] >= min(maxPerClient, (maxQuestions-r.total)/maxShare) {
		return false
	}
	r.total++
	r.active[client]++
	return true
}

func (r *Resolver) done(client netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total--
	if r.active[client]--; r.active[client] == 0 {
		delete(r.active, client)
	}
}

// limitedListener closes connections of clients that have too many.
type limitedListener struct {
	net.Listener
	r *Resolver
}

// Accept implements net.Listener.
func (b *limitedListener) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		client := addressOf(c.RemoteAddr())
		if b.r.admit(client) {
			return &countedConn{Conn: c, leave: sync.OnceFunc(func() { b.r.done(client) })}, nil
		}
		b.r.results.WithLabelValues(dropped).Inc()
		_ = c.Close()
	}
}

type countedConn struct {
	net.Conn
	leave func()
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	defer c.leave()
	return c.Conn.Close()
}

func addressOf(a net.Addr) netip.Addr {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Addr{}
	}
	return ap.Addr().Unmap().WithZone("")
}
