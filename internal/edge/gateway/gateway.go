package gateway

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/accesslog"
	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/edge/gateway/fastpath"
	"github.com/barchan-dev/barchan/internal/edge/gateway/ratelimit"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/gateway/server"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
	"github.com/barchan-dev/barchan/internal/edge/gateway/wake"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Routes is the part of a route table that a gateway uses; route.Table implements it.
type Routes interface {
	Lookup(id sandbox.ID) (*route.Entry, bool)
	Synced() bool
	All() iter.Seq[route.Route]
}

// Names finds a sandbox by its object's namespace and name.
type Names func(ctx context.Context, namespace, name string) (sandbox.ID, bool)

// Config configures a gateway. Routes, Tokens and Log are required; the rest has defaults.
type Config struct {
	// Domains under which sandboxes have hosts. A ":port" at the end is ignored.
	Domains []string
	Routes  Routes
	Tokens  credentials.Tokens
	// API serves requests that are not for a sandbox. Nil: 404.
	API http.Handler
	// Waker nil: no sandbox is woken.
	Waker wake.Waker
	// Names lets agent-sandbox's X-Sandbox-ID hold names. Names can be guessed, unlike IDs, so they
	// require a key or the sandbox's own token. Nil: that header holds sandbox IDs only.
	Names  Names
	Dialer endpoint.Dialer
	// Kept returns an open connection to a sandbox's agent, which then is the gateway's, for the first request after a claim; nil, also
	// for the function: there is none.
	Kept func(id sandbox.ID) net.Conn
	// Verifier has a sandbox's agent prove its identity for each new connection to its address. Nil: an address leads to
	// its sandbox, as it does where addresses rest before another sandbox gets them.
	Verifier endpoint.Verifier
	Log      *slog.Logger
	// AccessLog gets a record per request to a sandbox. Nil: Log gets it, at level debug.
	AccessLog *slog.Logger
	// Audit gets the records of commands and of writes of files; nil: none.
	Audit func(*accesslog.Record)
	// Registerer of the metrics. Nil: they are not registered.
	Registerer prometheus.Registerer

	// Tracing makes a span for each request to a sandbox. Nil: the caller's trace passes unchanged.
	Tracing trace.TracerProvider

	// SandboxRate limits the requests per second to a sandbox whose access policy sets no rate, with
	// bursts of one second's worth. 0: unlimited.
	SandboxRate float64
	// MemoryLow reports whether sandboxes that traffic wakes are paused before the time of their idle policy; nil: never.
	MemoryLow func() bool
	// SandboxRequests limits the requests in progress to a sandbox, streams and WebSockets included. 0: unlimited.
	SandboxRequests int
	// KeyRate limits the API requests per second of one key. 0: unlimited.
	KeyRate float64
	// KeyNamespace nil: there are no keys, and KeyRate counts each text sent as a key.
	KeyNamespace credentials.KeyNamespace

	// WakeTimeout bounds the wait for a sandbox to run. Default 60 s.
	WakeTimeout time.Duration
	// DialTimeout bounds one attempt to connect. Default 5 s.
	DialTimeout time.Duration
	// DialBackoff are the waits between attempts to connect to a closed port, which may be about to
	// open. Default 10, 25 and 50 ms; empty but not nil: a single attempt.
	DialBackoff []time.Duration
	// ClientIdle closes clients' connections without requests. Default 610 s.
	ClientIdle time.Duration
	// AgentIdle closes unused connections to agents. Default 60 s.
	AgentIdle time.Duration
	// StreamIdle ends an exchange, WebSockets included, after this time without data in either
	// direction. 0: never. The total time is not limited.
	StreamIdle time.Duration
	// NoFastPath sends all requests over the main path. The fast path changes no response, it only
	// costs less.
	NoFastPath bool
	// responseTime is the fast path's wait for a whole response. Default 50 ms; tests set it.
	responseTime time.Duration
	// continueWait is how long a body that expects "100 Continue" is held back. Default 1 s; tests set
	// it.
	continueWait time.Duration
	// idleInterval is the interval of idle policy checks. Default 1 s; tests set it.
	idleInterval time.Duration
	// ServiceIdle closes unused connections to other ports. Default 1.5 s, because many servers close
	// theirs after 2 or 5 s, and a request that crosses the close is lost.
	ServiceIdle time.Duration
}

// Gateway is an http.Handler for sandbox traffic. Make one with New.
type Gateway struct {
	cfg       Config
	domains   []string // without port, lower case
	log       *slog.Logger
	access    accesslog.Log
	metrics   *metrics
	upstreams sync.Map // *route.Epoch -> *upstream
	endpoints endpoint.Config
	requests  *traffic.Tracker
	fast      *fastpath.Path // nil: off
	back      *server.Server // serves the connections that fell back from the fast path
	wakes     wake.Group
	born      time.Time
	tracer    trace.Tracer // nil: off
	keys      ratelimit.Keys
	failures  credentials.Failures
}

// New checks the configuration and makes a gateway. It starts nothing.
func New(cfg Config) (*Gateway, error) {
	if cfg.Routes == nil || cfg.Tokens == nil || cfg.Log == nil {
		return nil, fmt.Errorf("gateway needs routes, tokens and a log: %w", errs.ErrInvalid)
	}
	g := &Gateway{cfg: cfg, log: cfg.Log.With(telemetry.Component, "gateway"), requests: traffic.NewTracker(), born: time.Now()}
	for _, d := range cfg.Domains {
		name := target.Hostname(d)
		if name == "" || strings.ContainsAny(name, "/ _:*") {
			return nil, fmt.Errorf("gateway domain %q: want a host name, with :port if need be: %w", d, errs.ErrInvalid)
		}
		g.domains = append(g.domains, name)
	}
	slices.SortFunc(g.domains, func(a, b string) int { return len(b) - len(a) }) // the most specific one first
	g.access = accesslog.New(cfg.AccessLog, g.log, cfg.Audit)
	if g.cfg.API == nil {
		g.cfg.API = http.NotFoundHandler()
	}
	if g.cfg.Dialer == nil {
		g.cfg.Dialer = &net.Dialer{KeepAlive: 30 * time.Second}
	}
	if g.cfg.DialBackoff == nil {
		g.cfg.DialBackoff = []time.Duration{10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond}
	}
	if cfg.Tracing != nil {
		g.tracer = cfg.Tracing.Tracer("github.com/barchan-dev/barchan/internal/edge/gateway")
	}
	g.keys = ratelimit.Keys{PerSecond: cfg.KeyRate, Namespace: cfg.KeyNamespace}
	g.cfg.WakeTimeout = cmp.Or(g.cfg.WakeTimeout, time.Minute)
	g.cfg.DialTimeout = cmp.Or(g.cfg.DialTimeout, 5*time.Second)
	g.cfg.ClientIdle = cmp.Or(g.cfg.ClientIdle, 610*time.Second)
	g.cfg.AgentIdle = cmp.Or(g.cfg.AgentIdle, time.Minute)
	g.cfg.responseTime = cmp.Or(g.cfg.responseTime, fastpath.ResponseTime)
	g.cfg.continueWait = cmp.Or(g.cfg.continueWait, time.Second)
	g.cfg.idleInterval = cmp.Or(g.cfg.idleInterval, time.Second)
	g.cfg.ServiceIdle = cmp.Or(g.cfg.ServiceIdle, 1500*time.Millisecond)
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register gateway metrics: %w", err)
	}
	g.metrics = m
	g.endpoints = endpoint.Config{
		Dialer: g.cfg.Dialer, Kept: g.cfg.Kept, Verifier: g.cfg.Verifier, DialTimeout: g.cfg.DialTimeout, Backoff: g.cfg.DialBackoff, AgentIdle: g.cfg.AgentIdle, ServiceIdle: g.cfg.ServiceIdle,
		ContinueWait: g.cfg.continueWait, Dials: m.dials,
	}
	g.wakes = wake.Group{Waker: cfg.Waker, Timeout: g.cfg.WakeTimeout, Requests: g.requests, Duration: m.wake, Log: g.log}
	g.back = g.newBack()
	if !cfg.NoFastPath && g.tracer == nil { // each traced request has a span
		g.fast = fastpath.New(fastpath.Config{
			Gateway: mainPath{g}, Log: g.log, ClientIdle: g.cfg.ClientIdle, ResponseTime: g.cfg.responseTime, HeadTime: server.HeadTime,
		})
	}
	return g, nil
}

// Server returns a server of the gateway's handler; see NewServer.
func (g *Gateway) Server(secure *tls.Config) *server.Server {
	return server.New(g, g.log, g.cfg.ClientIdle, secure)
}

// ServeHTTP implements http.Handler.
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	t, kind, err := target.Of(r, g.domains, g.bySignature)
	refused, _ := errors.AsType[*reply.Reply](err)
	switch {
	case refused != nil:
		g.metrics.answered(refused.Status)
		reply.OpenToBrowsers(w.Header())
		refused.Write(w, r, "")
	case errors.Is(err, envd.ErrSignatureInvalid) || errors.Is(err, envd.ErrSignatureExpired):
		g.metrics.answered(http.StatusUnauthorized)
		reply.OpenToBrowsers(w.Header())
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprintf(w, `{"code":%d,"message":%q}`+"\n", http.StatusUnauthorized, err.Error())
	case err != nil:
		g.metrics.answered(http.StatusBadRequest)
		reply.OpenToBrowsers(w.Header())
		http.Error(w, err.Error(), http.StatusBadRequest)
	case kind == target.ForAPI:
		g.serveAPI(w, r)
	default:
		u := g.takeUp(r, &t)
		if u == nil && g.startFastPath(w, r, &t) {
			return
		}
		g.serveSandbox(w, r, t, u) //nolint:contextcheck // the request has it
	}
}

// serveAPI passes a request to the API, if its key's rate allows it.
func (g *Gateway) serveAPI(w http.ResponseWriter, r *http.Request) {
	if after := g.keys.Take(r.Context(), credentials.APIKey(r)); after > 0 {
		g.metrics.answered(http.StatusBadRequest)
		reply.OpenToBrowsers(w.Header())
		reply.TooMany("with this API key", after).Write(w, r, "")
		return
	}
	g.cfg.API.ServeHTTP(w, r)
}

// serveSandbox counts, logs and contains what happens to one request.
// u is the request if the fast path admitted it.
func (g *Gateway) serveSandbox(w http.ResponseWriter, r *http.Request, t target.Target, u *inflight) {
	x := &exchange{g: g, w: w, r: r, rc: http.NewResponseController(w), Target: t, started: time.Now()}
	if u != nil {
		x.resume(u)
	} else if !g.requests.Begin() {
		w.Header().Set("Connection", "close")
		x.refuse(&reply.Reply{Status: http.StatusServiceUnavailable, Message: "The gateway is shutting down", RetryAfter: 1})
		return
	}
	if u == nil {
		g.metrics.inFlight.Inc()
	}
	end := x.span()
	defer func() {
		cause := recover()
		if x.begun != nil { // and then rejected by the main path
			x.begun.closeConn()
			x.begun.upstream.traffic.End(g.clock())
		}
		g.metrics.inFlight.Dec()
		defer g.requests.End() // nothing is logged after a drain
		x.report(r.Context())
		end()
		if cause == nil {
			return
		}
		if cause == http.ErrAbortHandler { //nolint:errorlint // a panic's value, compared as net/http does
			panic(cause)
		}
		g.log.ErrorContext(r.Context(), "request panicked", telemetry.Sandbox, t.ID, telemetry.Reason, cause, "stack", string(debug.Stack()))
		if x.status != 0 {
			panic(http.ErrAbortHandler)
		}
		http.Error(w, "internal error", http.StatusInternalServerError)
	}()
	x.run()
}

// Drain rejects new requests to sandboxes and waits until those in progress have ended, WebSockets
// included. When ctx ends first, it aborts the remaining ones and returns ctx's cause.
func (g *Gateway) Drain(ctx context.Context) error {
	idle := g.requests.Drain()
	if g.fast != nil {
		g.fast.Drain(false)
	}
	var err error
	select {
	case <-idle:
	case <-ctx.Done():
		err = fmt.Errorf("drain gateway: %w", context.Cause(ctx))
		g.requests.Abort()
	}
	g.upstreams.Range(func(_, u any) bool {
		u.(*upstream).Close()
		return true
	})
	if g.fast != nil {
		<-g.fast.Drain(err != nil)
	}
	<-idle
	if g.back.Shutdown(ctx) != nil { // some of its connections may carry API requests
		_ = g.back.Close()
	}
	return err
}
