// Package sshd is an SSH server in front of the sandboxes: shells, commands, SFTP and connections to their ports. It authenticates
// clients, and leaves to the gateway which sandbox is woken and how it is reached. It listens on nothing in a sandbox: connections
// back to the client (remote, X11 and agent forwarding) are refused.
//
// Authentication comes first, from memory alone, and a sandbox that does not exist refuses like one of another tenant.
//
// It holds no lock over a call of another package.
package sshd

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
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/crypto/ssh"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Limits of all clients.
const (
	// maxConns bounds the connections.
	maxConns = 1024
	// maxLogins bounds those that have not authenticated yet: all, and of one address.
	maxLogins        = 128
	maxLoginsPerHost = 32
	// loginTime bounds an authentication.
	loginTime = 30 * time.Second
	// maxChannels bounds the open channels of one connection; editors and browsers open dozens.
	maxChannels = 256
	// maxAuthTries bounds the keys and passwords that one connection may try.
	maxAuthTries = 10
)

// Gateway begins uses of sandboxes; gateway.Gateway implements it.
type Gateway interface {
	Visit(ctx context.Context, id sandbox.ID) (*gateway.Visit, error)
}

// Routes finds sandboxes; route.Table implements it.
type Routes interface {
	Lookup(id sandbox.ID) (*route.Entry, bool)
	Synced() bool
}

// SSHNamespaces returns the namespaces that the holder of a public key may enter, given its fingerprint.
type SSHNamespaces func(ctx context.Context, fingerprint string) ([]string, error)

// Config configures a server. All fields but Registerer and the times are required.
type Config struct {
	Gateway       Gateway
	Routes        Routes
	Tokens        credentials.Tokens
	KeyNamespace  credentials.KeyNamespace
	SSHNamespaces SSHNamespaces
	HostKey       *HostKey
	Log           *slog.Logger
	// Audit records logins; nil: nothing.
	Audit *auditlog.Log
	// Registerer of the metrics. Nil: they are not registered.
	Registerer prometheus.Registerer
	// Idle closes connections without channels. Default 610 s.
	Idle time.Duration
	// StreamIdle ends a channel in which nothing moves. 0: never.
	StreamIdle time.Duration
	// Keepalive is the interval of requests that find out whether a client is still there; one without an answer for
	// three intervals is not. Default 30 s.
	Keepalive time.Duration
	// Grace is how long channels may continue after a stop request. Default 5 s.
	Grace time.Duration
}

// Server serves connections. Make one with New.
type Server struct {
	cfg      Config
	log      *slog.Logger
	failures credentials.Failures
	metrics  *metrics
	born     time.Time

	mu     sync.Mutex
	conns  map[*conn]struct{}   // +checklocks:mu
	logins map[netip.Prefix]int // +checklocks:mu
	// waiting is the sum of logins, open the number of connections.
	waiting, open int  // +checklocks:mu
	stopping      bool // +checklocks:mu
}

// New checks the configuration and starts nothing.
func New(cfg Config) (*Server, error) {
	if cfg.Gateway == nil || cfg.Routes == nil || cfg.Tokens == nil || cfg.KeyNamespace == nil || cfg.SSHNamespaces == nil || cfg.HostKey == nil || cfg.Log == nil {
		return nil, fmt.Errorf("sshd needs a gateway, routes, tokens, keys, a host key and a log: %w", errs.ErrInvalid)
	}
	cfg.Idle = cmp.Or(cfg.Idle, 610*time.Second)
	cfg.Keepalive = cmp.Or(cfg.Keepalive, 30*time.Second)
	cfg.Grace = cmp.Or(cfg.Grace, 5*time.Second)
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register SSH metrics: %w", err)
	}
	return &Server{
		cfg: cfg, log: cfg.Log.With(telemetry.Component, "sshd"), metrics: m, born: time.Now(),
		conns: map[*conn]struct{}{}, logins: map[netip.Prefix]int{},
	}, nil
}

// Serve accepts connections until ctx ends. It then closes those without channels, gives the channels of the others a moment, and
// returns when all have ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	live, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	for {
		nc, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = nc.Close()
			}
			s.drain(&wg)
			return context.Cause(ctx)
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept SSH connections at %s: %w", l.Addr(), err)
		case err != nil: // for instance, no more files
			s.log.WarnContext(ctx, "connection not accepted", telemetry.Error, err)
			select {
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
		default:
			wg.Go(func() { s.serve(ctx, live, nc) })
		}
	}
}

// acceptPause is the wait after a failure to accept a connection.
const acceptPause = 100 * time.Millisecond

// drain ends all connections; wg waits for them.
func (s *Server) drain(wg *sync.WaitGroup) {
	s.mu.Lock()
	s.stopping = true
	for c := range s.conns {
		if c.channels.Load() == 0 {
			c.close()
		}
	}
	s.mu.Unlock()
	timer := time.AfterFunc(s.cfg.Grace, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			c.close()
		}
	})
	defer timer.Stop()
	wg.Wait()
}

// serve authenticates one connection until ctx ends, and serves it until live does.
func (s *Server) serve(ctx, live context.Context, nc net.Conn) {
	defer func() { _ = nc.Close() }()
	from := credentials.ClientPrefix(nc.RemoteAddr().String())
	if !s.admit(from) {
		s.metrics.logins.WithLabelValues("none", "rejected").Inc()
		return
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	c, chans, reqs, err := s.login(live, nc)
	stop()
	if !s.admitted(from, c) {
		return
	}
	if err != nil {
		s.leave(nil)
		s.log.DebugContext(ctx, "SSH login refused", telemetry.Address, nc.RemoteAddr().String(), telemetry.Error, err)
		return
	}
	defer s.leave(c)
	c.run(live, chans, reqs)
}

// admit counts a connection that is to authenticate, and reports false if there are too many.
func (s *Server) admit(from netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping || s.open >= maxConns || s.waiting >= maxLogins || s.logins[from] >= maxLoginsPerHost {
		return false
	}
	s.open++
	s.waiting++
	s.logins[from]++
	return true
}

// admitted ends what admit counted as a login. c is the connection, nil if it failed. It reports false, and counts the connection no
// longer, if the server stops.
func (s *Server) admitted(from netip.Prefix, c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting--
	if s.logins[from]--; s.logins[from] == 0 {
		delete(s.logins, from)
	}
	if s.stopping {
		s.open--
		return false
	}
	if c != nil {
		s.conns[c] = struct{}{}
	}
	return true
}

func (s *Server) leave(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open--
	delete(s.conns, c)
}

func (s *Server) isStopping() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopping
}

// clock is the time since the server was made. Unlike the machine's, it does not jump.
func (s *Server) clock() time.Duration { return time.Since(s.born) }

// conn is an authenticated connection.
type conn struct {
	s     *Server
	ssh   *ssh.ServerConn
	close func()
	login *login
	// channels are the open ones; idle is when the last was closed, by the server's clock.
	channels atomic.Int64
	idle     atomic.Int64
	wg       sync.WaitGroup
}

// metrics of the server.
type metrics struct {
	logins   *prometheus.CounterVec
	channels *prometheus.CounterVec
	open     prometheus.Gauge
}

// Metrics registers the metrics of a server without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to)
	return err
}

func newMetrics(to prometheus.Registerer) (*metrics, error) {
	const subsystem = "ssh"
	m := &metrics{
		logins: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "logins_total", Help: "SSH logins, by method and result: `ok`, `failed`, or `rejected`: too many connections.",
		}, []string{"method", "result"}),
		channels: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "channels_total", Help: "SSH channels, by kind (`session`, `port`, `socket`, `other`) and result: `ok`, `failed`, `rejected`.",
		}, []string{"kind", "result"}),
		open: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "connections", Help: "Number of open SSH connections after login.",
		}),
	}
	return m, telemetry.Register(to, m.logins, m.channels, m.open)
}
