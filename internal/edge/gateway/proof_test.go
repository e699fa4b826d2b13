package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
)

// atAddress is what a test has at the address of a sandbox: an agent, and on every other port one service.
type atAddress struct {
	net.Dialer
	mu             sync.Mutex
	agent, service string // +checklocks:mu
	dials          atomic.Int64
}

func (d *atAddress) set(agent, service string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.agent, d.service = agent, service
}

func (d *atAddress) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	d.mu.Lock()
	to := d.service
	if strings.HasSuffix(address, ":"+target.PortText(envd.Port)) {
		to = d.agent
	}
	d.mu.Unlock()
	d.dials.Add(1)
	return d.Dialer.DialContext(ctx, network, to)
}

// proving is an agent that says to be a sandbox, as the real one of TestRealAgent does.
type proving struct {
	token, id       string
	asked, requests atomic.Int64
	tokens          atomic.Int64 // requests with one
}

func (a *proving) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get(envd.HeaderAccessToken) != "" {
		a.tokens.Add(1)
	}
	if r.URL.Path != envd.PathIdentity {
		a.requests.Add(1)
		fmt.Fprint(w, "the agent")
		return
	}
	a.asked.Add(1)
	addr, _ := envd.AddrOf(r.Context().Value(http.LocalAddrContextKey).(net.Addr))
	p := envd.ProveIdentity(a.token, "", r.URL.Query().Get(envd.QueryNonce), a.id, addr)
	fmt.Fprintf(w, `{"proof":%q}`, p.Proof)
}

// verified is a fixture whose gateway verifies agents, with a sandbox, its agent and its service. Nothing is idle for too long.
type verified struct {
	*fixture
	*box
	at       *atAddress
	agent    *proving
	agentAt  string
	service  string
	registry *prometheus.Registry
}

const anyPort = 8080

func newVerified(t *testing.T) *verified {
	t.Helper()
	v := &verified{at: &atAddress{}, registry: prometheus.NewRegistry()}
	v.fixture = newFixture(t, func(c *Config) {
		c.Dialer, c.Verifier, c.Registerer = v.at, identity.NewVerifier(c.Tokens.(*sandbox.Tokens)), v.registry
		c.ServiceIdle, c.responseTime = time.Minute, time.Minute
	})
	v.box = v.fixture.box("proved")
	v.agent = &proving{token: v.tokens.Agent(v.id), id: string(v.id)}
	v.agentAt = loopback(backend(t, v.agent.ServeHTTP))
	v.service = loopback(backend(t, hello))
	v.at.set(v.agentAt, v.service)
	return v
}

func loopback(port uint16) string {
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String()
}

// unproved is the metric.
func (v *verified) unproved(t *testing.T) (n float64) {
	t.Helper()
	families, err := v.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "barchan_gateway_dials_total" && m.GetLabel()[0].GetValue() == "unproved" {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

// stranger listens where a sandbox was, and requires that it receives not one byte.
func stranger(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if text, _ := io.ReadAll(c); len(text) > 0 { // returns since the gateway closes the connection
				t.Errorf("a stranger received %q", text)
			}
			_ = c.Close()
		}
	})
	t.Cleanup(func() { _ = l.Close(); serving.Wait() })
	return l.Addr().String()
}

// TestProofOncePerConnection: an address is proved for each new connection, and for no request on one that was used before.
func TestProofOncePerConnection(t *testing.T) {
	v := newVerified(t)
	for range 5 {
		if status, text := v.get(v.url(anyPort, "/")); status != http.StatusOK || text != "hello" {
			t.Fatalf("got %d %q", status, text)
		}
		v.idle()
	}
	services := int64(1) // connections
	if !noFastPath {
		services = 2 // the fast path has one of its own
	}
	if asked, dials := v.agent.asked.Load(), v.at.dials.Load(); asked != services || dials != services+1 {
		t.Errorf("5 requests to a service: %d proofs and %d connections, want %d and one more, to the agent", asked, dials, services)
	}
}

// TestProofOfTheAgentItself: a connection to the agent carries its own proof.
func TestProofOfTheAgentItself(t *testing.T) {
	v := newVerified(t)
	for range 5 {
		if status, text := v.get(v.url(envd.Port, "/")); status != http.StatusOK || text != "the agent" {
			t.Fatalf("got %d %q", status, text)
		}
		v.idle()
	}
	if asked, dials := v.agent.asked.Load(), v.at.dials.Load(); asked != dials || dials > 2 {
		t.Errorf("5 requests to the agent: %d proofs over %d connections", asked, dials)
	}
	asked := v.agent.asked.Load()
	res, text := v.do(v.h2c, http.MethodPost, v.url(envd.Port, "/"), http.NoBody, "Content-Type", "application/grpc") //nolint:bodyclose // do closes it
	if res.StatusCode != http.StatusOK || text != "the agent" || v.agent.asked.Load() != asked+1 {
		t.Errorf("over HTTP/2: %d %q after %d proofs", res.StatusCode, text, v.agent.asked.Load()-asked)
	}
}

// TestStranger: a new connection to an address without a proof carries nothing, and the next request tries again.
func TestStranger(t *testing.T) {
	notFound := func(w http.ResponseWriter, _ *http.Request) { http.NotFound(w, nil) }
	for name, agentOf := range map[string]func(t *testing.T, v *verified) string{
		"another sandbox": func(t *testing.T, v *verified) string {
			return loopback(backend(t, (&proving{token: v.tokens.Agent(sandbox.IDOf("x")), id: string(sandbox.IDOf("x"))}).ServeHTTP))
		},
		"no agent of ours": func(t *testing.T, _ *verified) string { return loopback(backend(t, notFound)) },
		"no agent":         func(t *testing.T, _ *verified) string { return loopback(closedPort(t)) },
	} {
		t.Run(name, func(t *testing.T) {
			v := newVerified(t)
			agent := agentOf(t, v)
			v.at.set(agent, stranger(t))
			for _, c := range []*http.Client{v.client, v.h2c} {
				res, text := v.do(c, http.MethodPost, v.url(anyPort, "/"), strings.NewReader("secret")) //nolint:bodyclose // do closes it
				if res.StatusCode != http.StatusBadGateway || !strings.Contains(text, reply.Silent.Message) {
					t.Errorf("got %d %q", res.StatusCode, text)
				}
			}
			if n := v.unproved(t); (n == 0) != (name == "no agent") {
				t.Errorf("%v connections are counted as unproved", n)
			}
			v.at.set(v.agentAt, v.service)
			if status, text := v.get(v.url(anyPort, "/")); status != http.StatusOK || text != "hello" {
				t.Errorf("once the sandbox is back: %d %q", status, text)
			}
		})
	}
}

// TestStrangerAsAgent has a stranger's agent receive neither a request to the agent nor, where a port is closed, the
// gateway's token for it.
func TestStrangerAsAgent(t *testing.T) {
	v := newVerified(t)
	other := &proving{token: "other", id: string(v.id)}
	v.at.set(loopback(backend(t, other.ServeHTTP)), loopback(closedPort(t)))
	for _, port := range []uint16{envd.Port, anyPort} {
		status, text := v.get(v.url(port, "/"), envd.HeaderAccessToken, "secret")
		if status != http.StatusBadGateway || !strings.Contains(text, reply.Silent.Message) {
			t.Errorf("port %d: %d %q", port, status, text)
		}
	}
	if asked, n, tokens := other.asked.Load(), other.requests.Load(), other.tokens.Load(); asked == 0 || n > 0 || tokens > 0 {
		t.Errorf("the stranger was asked %d times, and received %d requests and %d tokens", asked, n, tokens)
	}
}

// TestStrangerOnTheFastPath: a connection that the fast path opens is proved too.
func TestStrangerOnTheFastPath(t *testing.T) {
	if noFastPath {
		t.Skip("the fast path is off in this run")
	}
	v := newVerified(t)
	c := v.fastConn(t, v.box, anyPort)
	entry, ok := v.table.Lookup(v.id)
	if !ok {
		t.Fatal("no route")
	}
	u := v.gateway.upstreamOf(entry)
	for _, port := range []uint16{anyPort, envd.Port} { // the sandbox's connections ended with it
		for c := u.Pool().Get(port); c != nil; c = u.Pool().Get(port) {
			_ = c.Close()
		}
		u.Transport(port, false).CloseIdleConnections()
	}
	v.at.set(loopback(backend(t, (&proving{token: "other"}).ServeHTTP)), stranger(t))
	before := v.unproved(t)
	status, text := ask(t, c, "POST / HTTP/1.1\r\nHost: "+v.host(anyPort)+"\r\nContent-Length: 6\r\n\r\nsecret")
	if status != http.StatusBadGateway || !strings.Contains(text, reply.Silent.Message) {
		t.Errorf("got %d %q", status, text)
	}
	if n := v.unproved(t) - before; n != 2 {
		t.Errorf("%v connections are unproved, want that of the fast path and that of the main path", n)
	}
}
