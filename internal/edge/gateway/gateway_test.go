package gateway

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestMain checks for goroutines that are left. The server of net/http lingers after it has closed a
// connection under a client that is still sending.
func TestMain(m *testing.M) {
	eventually.LeaveNoGoroutines(bothPaths{m}, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

// noFastPath is the setting of all gateways in a run.
var noFastPath bool

// bothPaths runs all tests twice: with the fast path and without.
type bothPaths struct{ *testing.M }

// Run implements goleak.TestingM.
func (m bothPaths) Run() int {
	code := m.M.Run()
	for _, name := range []string{"test.fuzz", "test.fuzzworker", "test.list"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != f.DefValue {
			return code
		}
	}
	if code == 0 {
		noFastPath = true
		code = m.M.Run()
	}
	return code
}

const testDomain = "box.test"

// fixture is a gateway on loopback with a table that the test writes. Sandboxes have made-up
// addresses; the dialer leads them to loopback, with the port unchanged.
type fixture struct {
	t       testing.TB
	table   *route.Table
	tokens  *sandbox.Tokens
	gateway *Gateway
	addr    string // of the gateway
	version atomic.Int64
	dials   atomic.Int64
	client  *http.Client
	h2c     *http.Client
}

// loopDialer leads every address to loopback.
type loopDialer struct {
	net.Dialer
	dials *atomic.Int64
}

func (d *loopDialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	d.dials.Add(1)
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	return d.Dialer.DialContext(ctx, network, net.JoinHostPort("127.0.0.1", port))
}

func newFixture(t testing.TB, change ...func(*Config)) *fixture {
	t.Helper()
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	w := &fixture{t: t, table: route.NewTable(), tokens: tokens}
	w.table.MarkSynced()
	cfg := Config{
		Domains: []string{testDomain + ":7700"}, Routes: w.table, Tokens: tokens, Log: telemetry.Discard(),
		Dialer: &loopDialer{dials: &w.dials}, Registerer: prometheus.NewRegistry(),
		NoFastPath: noFastPath,
		API:        http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "the API") }),
	}
	for _, f := range change {
		f(&cfg)
	}
	if w.gateway, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	w.addr = serve(t, w.gateway.Server(nil))
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
		cancel()
		_ = w.gateway.Drain(ctx)
	})
	w.client = clientTo(t, w.addr, func(p *http.Protocols) { p.SetHTTP1(true) })
	w.h2c = clientTo(t, w.addr, func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })
	return w
}

// testServer is a server.Server, or an http.Server.
type testServer interface {
	Serve(l net.Listener) error
	Close() error
}

// serve runs a server on loopback until the test ends.
func serve(t testing.TB, s testServer) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() {
		_ = s.Close()
		<-done
	})
	return l.Addr().String()
}

// clientTo makes a client that reaches addr for any host of the URL.
func clientTo(t testing.TB, addr string, protocols func(*http.Protocols)) *http.Client {
	t.Helper()
	p := &http.Protocols{}
	protocols(p)
	tr := &http.Transport{
		Protocols: p, DisableCompression: true, MaxIdleConnsPerHost: 256,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		},
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// backend runs a service on loopback, in HTTP/1.1 and h2c, and returns its port.
func backend(t testing.TB, h http.HandlerFunc) uint16 {
	t.Helper()
	p := &http.Protocols{}
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return portOf(t, serve(t, &http.Server{Handler: h, Protocols: p, ReadHeaderTimeout: time.Minute}))
}

func portOf(t testing.TB, addr string) uint16 {
	t.Helper()
	return netip.MustParseAddrPort(addr).Port()
}

// box is a sandbox object that tests change and apply.
type box struct {
	*agents.Sandbox
	w  *fixture
	id sandbox.ID
}

// box makes a running sandbox, known to the table.
func (w *fixture) box(name string, change ...func(*agents.Sandbox)) *box {
	uid := types.UID("uid-of-" + name)
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uid}}
	s.Spec.Barchan = &agents.BarchanSpec{}
	s.Status.Barchan = &agents.BarchanStatus{}
	b := &box{Sandbox: s, w: w, id: sandbox.IDOf(uid)}
	n := w.version.Add(1) // no two sandboxes have the same address
	b.run(netip.AddrFrom4([4]byte{10, 9, byte(1 + n>>8), byte(n)}).String())
	for _, f := range change {
		f(s)
	}
	b.apply()
	return b
}

func (b *box) apply() {
	b.ResourceVersion = strconv.FormatInt(b.w.version.Add(1), 10)
	b.w.table.Apply(b.DeepCopy())
}

func (b *box) run(addr string) {
	b.Status.PodIPs = []string{addr}
	b.Spec.OperatingMode = agents.ModeRunning
	b.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	now := metav1.NewTime(time.Unix(b.w.version.Add(1), 0))
	b.Status.Barchan.StartedAt = &now
}

func (b *box) sleep() {
	b.Spec.OperatingMode = agents.ModeSuspended
	b.Status.Conditions = []metav1.Condition{{Type: agents.ConditionSuspended, Status: metav1.ConditionTrue}}
}

func (b *box) kill() {
	now := metav1.Now()
	b.DeletionTimestamp = &now
	b.apply()
}

func (b *box) url(port uint16, path string) string {
	return fmt.Sprintf("http://%d-%s.%s%s", port, b.id, testDomain, path)
}

// host is the sandbox's for a port.
func (b *box) host(port uint16) string {
	return strings.TrimSuffix(strings.TrimPrefix(b.url(port, ""), "http://"), "/")
}

// get sends a request and returns status and body.
func (w *fixture) get(url string, headers ...string) (int, string) {
	w.t.Helper()
	res, text := w.do(w.client, http.MethodGet, url, nil, headers...) //nolint:bodyclose // do closes it
	return res.StatusCode, text
}

func (w *fixture) do(c *http.Client, method, url string, body io.Reader, headers ...string) (*http.Response, string) {
	w.t.Helper()
	res, text, err := w.try(c, method, url, body, headers...)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, url, err)
	}
	return res, text
}

// statusOf is do, for any goroutine. 0: there was no answer.
func (w *fixture) statusOf(c *http.Client, url string) int {
	res, _, err := w.try(c, http.MethodGet, url, nil) //nolint:bodyclose // try closes it
	if err != nil {
		w.t.Errorf("GET %s: %v", url, err)
		return 0
	}
	return res.StatusCode
}

func (w *fixture) try(c *http.Client, method, url string, body io.Reader, headers ...string) (*http.Response, string, error) {
	req, err := http.NewRequestWithContext(w.t.Context(), method, url, body)
	if err != nil {
		return nil, "", err
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
		if headers[i] == "Host" {
			req.Host = headers[i+1]
		}
	}
	res, err := c.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	return res, string(text), err
}

func TestRequestReachesTheSandbox(t *testing.T) {
	w := newFixture(t, func(c *Config) { c.ServiceIdle = eventually.Patience })
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Seen", r.Host+" "+r.RequestURI)
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprintf(w, "%s %s", r.Method, body)
	})
	b := w.box("a")
	for name, c := range map[string]*http.Client{"http1": w.client, "h2c": w.h2c} {
		t.Run(name, func(t *testing.T) {
			for range 3 {
				res, text := w.do(c, http.MethodPost, b.url(port, "/a%2Fb/c?x=1;2&y="), strings.NewReader("hello")) //nolint:bodyclose // do closes it
				if res.StatusCode != http.StatusTeapot || text != "POST hello" {
					t.Fatalf("got %d %q", res.StatusCode, text)
				}
				if want := fmt.Sprintf("%d-%s.%s /a%%2Fb/c?x=1;2&y=", port, b.id, testDomain); res.Header.Get("X-Seen") != want {
					t.Errorf("sandbox saw %q, want %q", res.Header.Get("X-Seen"), want)
				}
				w.idle() // the connection is back
			}
		})
	}
	if n := w.dials.Load(); n != 1 {
		t.Errorf("6 requests made %d connections, want one used again", n)
	}
}
