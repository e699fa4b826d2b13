package agentclient

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/agentclient/connpool"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// listener is an agent that notes on which connection each path was requests for.
type listener struct {
	*httptest.Server
	mu       sync.Mutex
	requests map[string][]string // +checklocks:mu
	silent   chan struct{}       // until it is closed, nothing is answered; nil: all is; +checklocks:mu
}

func newListener(t *testing.T) *listener {
	t.Helper()
	l := &listener{requests: map[string][]string{}}
	l.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.mu.Lock()
		l.requests[r.URL.Path] = append(l.requests[r.URL.Path], r.RemoteAddr)
		silent := l.silent
		l.mu.Unlock()
		if silent != nil {
			<-silent
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(l.Close)
	return l
}

// hold has nothing answered until the returned function is called.
func (l *listener) hold() (answer func()) {
	silent := make(chan struct{})
	l.mu.Lock()
	l.silent = silent
	l.mu.Unlock()
	return sync.OnceFunc(func() {
		close(silent)
		l.mu.Lock()
		l.silent = nil
		l.mu.Unlock()
	})
}

func (l *listener) connections(path string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string{}, l.requests[path]...)
}

// newBinderTo returns a binder that runs and whose every connection reaches l.
func newBinderTo(t *testing.T, l *listener) *Client {
	t.Helper()
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	b := New(Config{Tokens: tokens, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", l.Listener.Addr().String())
	}})
	cfg := b.poolConfig()
	cfg.OpenTimeout = eventually.Patience // an opening that times out is not repeated
	b.Pool = connpool.New(cfg)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = b.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return b
}

// keep shows the client a spare member until it keeps a connection to it.
func keep(t *testing.T, b *Client, s *agents.Sandbox) {
	t.Helper()
	eventually.True(t, "no connection is kept", func() bool {
		b.Observe(nil, s)
		conn := b.Take(sandbox.IDOf(s.UID))
		if conn != nil {
			b.Put(s, conn)
		}
		return conn != nil
	})
}

// newKept returns a binder that keeps a connection to a spare member, whose agent is l.
func newKept(t *testing.T) (l *listener, b *Client, s *agents.Sandbox) {
	t.Helper()
	l = newListener(t)
	b, s = newBinderTo(t, l), spare()
	keep(t, b, s)
	return l, b, s
}

func spare() *agents.Sandbox {
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "a", UID: "a", Labels: map[string]string{agents.LabelWarmPoolSandbox: "p"}}}
	s.Status.PodIPs = []string{"192.0.2.1"}
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	return s
}

func TestBinderUsesTheConnectionThatWaits(t *testing.T) {
	l := newListener(t)
	b := newBinderTo(t, l)
	s := spare()
	keep(t, b, s)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 2 { // the first leaves it open
		if err := b.Bind(ctx, s, envd.InitRequest{EnvVars: map[string]string{"A": "b"}}); err != nil {
			t.Fatal(err)
		}
	}
	greeted, bound := l.connections(envd.PathHealth), l.connections(envd.PathInit)
	if len(greeted) != 1 || len(bound) != 2 || bound[0] != greeted[0] || bound[1] != greeted[0] {
		t.Errorf("greeted on %v, bound on %v: want both on the connection that was open", greeted, bound)
	}
	// It is left for the first request to the sandbox.
	conn := b.Take(sandbox.IDOf(s.UID))
	if conn == nil {
		t.Fatal("no connection is left after the claim")
	}
	defer func() { _ = conn.Close() }()
	if conn.LocalAddr().String() != greeted[0] {
		t.Errorf("left is %s, want %s", conn.LocalAddr(), greeted[0])
	}
	if again := b.Take(sandbox.IDOf(s.UID)); again != nil {
		t.Error("one connection was given away twice")
	}
	if err := b.Bind(ctx, s, envd.InitRequest{}); err != nil {
		t.Errorf("bind without an open connection: %v", err)
	}
}

// TestBindEndsWithItsContext: an agent that does not answer on its open connection holds nothing up beyond that.
func TestBindEndsWithItsContext(t *testing.T) {
	l, b, s := newKept(t)
	t.Cleanup(l.hold())
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if err := b.Bind(ctx, s, envd.InitRequest{}); err == nil {
		t.Error("bound by an agent that has not answered")
	}
}

// TestWake: the agent of a ready member answers once more on its kept connection, which Bind waits for and uses.
func TestWake(t *testing.T) {
	l := newListener(t)
	b := newBinderTo(t, l)
	s := spare()
	b.Wake(t.Context(), s) // nothing is kept for it
	keep(t, b, s)
	answer := l.hold()
	b.Wake(t.Context(), s)
	b.Wake(t.Context(), s) // once is enough
	answer()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := b.Bind(ctx, s, envd.InitRequest{EnvVars: map[string]string{"A": "b"}}); err != nil {
		t.Fatal(err)
	}
	answered, bound := l.connections(envd.PathHealth), l.connections(envd.PathInit)
	if len(answered) != 2 || len(bound) != 1 || answered[0] != answered[1] || bound[0] != answered[0] {
		t.Errorf("answered on %v, bound on %v: want two answers and the bind on one connection", answered, bound)
	}
}

// TestWakeOfAClosedConnection: the bind that follows opens another.
func TestWakeOfAClosedConnection(t *testing.T) {
	l, b, s := newKept(t)
	l.CloseClientConnections()
	b.Wake(t.Context(), s)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := b.Bind(ctx, s, envd.InitRequest{}); err != nil {
		t.Error(err)
	}
	if n := len(l.connections(envd.PathInit)); n != 1 {
		t.Errorf("bound %d times", n)
	}
}

func TestBinderSurvivesAClosedConnection(t *testing.T) {
	l, b, s := newKept(t)
	l.CloseClientConnections()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := b.Bind(ctx, s, envd.InitRequest{}); err != nil {
		t.Errorf("bind after the agent has closed: %v", err)
	}
}

// occupant is what is at an address: an agent with a token, or its hash, or a stranger's with another.
type occupant struct {
	*listener
	token, hash string
	secrets     atomic.Int64 // requests that carry a token
}

func newOccupant(t *testing.T, id sandbox.ID, token, hash string) *occupant {
	t.Helper()
	o := &occupant{token: token, hash: hash, listener: &listener{requests: map[string][]string{}}}
	o.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Header.Get(envd.HeaderAccessToken) != "" || strings.Contains(string(body), "secret") {
			o.secrets.Add(1)
		}
		o.mu.Lock()
		o.requests[r.URL.Path] = append(o.requests[r.URL.Path], r.RemoteAddr)
		o.mu.Unlock()
		if r.URL.Path == envd.PathIdentity {
			addr, _ := envd.AddrOf(r.Context().Value(http.LocalAddrContextKey).(net.Addr))
			_ = json.NewEncoder(w).Encode(envd.ProveIdentity(o.token, o.hash, r.URL.Query().Get(envd.QueryNonce), string(id), addr))
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(o.Close)
	return o
}

// TestStrangerGetsNoToken has every request meet a stranger at the sandbox's address, and its own agent before and after
// that knows its token.
func TestStrangerGetsNoToken(t *testing.T) {
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	s := spare()
	id := sandbox.IDOf(s.UID)
	token := tokens.Agent(id)
	for name, at := range map[string]struct {
		token, hash string
		started     bool // what needs the token is accepted
		begun       bool // what brings the token is accepted
	}{
		"stranger":        {token: "other"},
		"no agent":        {},
		"agent":           {token: token, started: true, begun: true},
		"tokenless agent": {hash: envd.TokenSHA256(token), begun: true},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOccupant(t, id, at.token, at.hash)
			b := New(Config{Tokens: tokens, Verifier: identity.NewVerifier(tokens), Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", o.Listener.Addr().String())
			}})
			for what, call := range map[string]struct {
				send func() error
				want bool
			}{
				"claim": {func() error {
					return b.Bind(t.Context(), s, envd.InitRequest{EnvVars: map[string]string{"A": "secret"}})
				}, at.started},
				"start": {func() error { return b.Bind(t.Context(), s, envd.InitRequest{AccessToken: token}) }, at.begun},
				"logs":  {func() error { _, err := b.Logs(t.Context(), s, "", time.Time{}); return err }, at.started},
			} {
				before := o.secrets.Load()
				err := call.send()
				if sent := o.secrets.Load() - before; (err == nil) != call.want || (sent > 0) != call.want {
					t.Errorf("%s: %v; %d requests with a secret, want any: %v", what, err, sent, call.want)
				}
			}
		})
	}
}

// TestKeptConnectionIsVerified: a connection that waits for its claim was proved when it was opened, and is not asked again.
func TestKeptConnectionIsVerified(t *testing.T) {
	s := spare()
	id := sandbox.IDOf(s.UID)
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	o := newOccupant(t, id, tokens.Agent(id), "")
	b := newBinderTo(t, o.listener)
	b.verifier = identity.NewVerifier(tokens)
	keep(t, b, s)
	kept := o.connections(envd.PathIdentity)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := b.Bind(ctx, s, envd.InitRequest{EnvVars: map[string]string{"A": "b"}}); err != nil {
		t.Fatal(err)
	}
	if bound := o.connections(envd.PathInit); len(kept) == 0 || len(bound) != 1 || bound[0] != kept[0] {
		t.Errorf("proved on %v, bound on %v", kept, bound)
	}
	if n := len(o.connections(envd.PathHealth)); n > 0 {
		t.Errorf("%d requests besides", n)
	}
}

// TestStatsHistory: an agent older than the route has the present sample alone; other errors are errors.
func TestStatsHistory(t *testing.T) {
	status := http.StatusNotFound
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == envd.PathMetrics:
			_, _ = io.WriteString(w, `{"ts":3}`)
		case status == http.StatusOK:
			_, _ = io.WriteString(w, `[{"ts":1},{"ts":2}]`)
		default:
			w.WriteHeader(status)
		}
	}))
	t.Cleanup(agent.Close)
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	b := New(Config{Tokens: tokens, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", agent.Listener.Addr().String())
	}})
	for _, c := range []struct{ status, want int }{{http.StatusNotFound, 1}, {http.StatusOK, 3}, {http.StatusInternalServerError, 0}} {
		status = c.status
		all, err := b.StatsHistory(t.Context(), spare(), time.Time{})
		if len(all) != c.want || (err != nil) != (c.want == 0) {
			t.Errorf("%d: %+v, %v", c.status, all, err)
		}
	}
}

// TestSilentAgent has an agent that answers nothing: clients' requests end within seconds, and the server is not at fault.
func TestSilentAgent(t *testing.T) {
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	for name, ask := range map[string]func(ctx context.Context, b *Client) error{
		"metrics": func(ctx context.Context, b *Client) error { _, err := b.Stats(ctx, spare()); return err },
		"history": func(ctx context.Context, b *Client) error {
			_, err := b.StatsHistory(ctx, spare(), time.Time{})
			return err
		},
		"logs": func(ctx context.Context, b *Client) error {
			_, err := b.Logs(ctx, spare(), "", time.Time{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := New(Config{Tokens: tokens, Dial: func(context.Context, string, string) (net.Conn, error) {
					here, there := net.Pipe()
					go func() { _, _ = io.Copy(io.Discard, there) }()
					return here, nil
				}})
				begin := time.Now()
				if err := ask(t.Context(), b); !errors.Is(err, errs.ErrTimeout) {
					t.Errorf("%v", err)
				}
				if took := time.Since(begin); took != 5*time.Second {
					t.Errorf("ended after %s", took)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if err := ask(ctx, b); !errors.Is(err, context.DeadlineExceeded) || errs.Kind(err) != nil {
					t.Errorf("the caller's own limit: %v", err)
				}
			})
		})
	}
}

// TestNoRedirect: an agent does not choose where a request goes.
func TestNoRedirect(t *testing.T) {
	other := newListener(t)
	agent := httptest.NewServer(http.RedirectHandler(other.URL+"/x", http.StatusTemporaryRedirect))
	t.Cleanup(agent.Close)
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	b := New(Config{Tokens: tokens, Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", strings.Replace(address, "192.0.2.1:49983", agent.Listener.Addr().String(), 1))
	}})
	if err := b.Bind(t.Context(), spare(), envd.InitRequest{}); err == nil || len(other.connections("/x")) > 0 {
		t.Errorf("bound %v, %d requests elsewhere", err, len(other.connections("/x")))
	}
}
