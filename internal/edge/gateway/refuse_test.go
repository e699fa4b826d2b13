package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

func private(s *agents.Sandbox) {
	no := false
	s.Spec.Barchan.Access = &agents.AccessPolicy{PublicTraffic: &no}
}

func hello(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }

// closedPort is a port of loopback without a listener, and none can listen until the test ends: it is taken.
func closedPort(t *testing.T) uint16 {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return uint16(at.(*unix.SockaddrInet4).Port) //nolint:gosec // a port
}

func TestRefusals(t *testing.T) {
	w := newFixture(t)
	port, closed := backend(t, hello), closedPort(t)
	up, paused, dead, shut := w.box("up"), w.box("paused"), w.box("dead"), w.box("shut", private)
	paused.sleep()
	paused.apply()
	dead.kill()
	host := func(b *box, port uint16) string { return fmt.Sprintf("%d-%s.%s", port, b.id, testDomain) }
	gone := func(b *box) string {
		return fmt.Sprintf(`{"sandboxId":"%s","message":"The sandbox was not found","code":502}`, b.id)
	}
	for name, c := range map[string]struct {
		host, path string
		headers    []string
		status     int
		body       string // exact; ends in … for a beginning
	}{
		"running":          {host(up, port), "/", nil, 200, "hello"},
		"client ID":        {fmt.Sprintf("%d-%s-c1-c2.%s", port, up.id, testDomain), "/", nil, 200, "hello"},
		"upper case, port": {strings.ToUpper(host(up, port)) + ":7700", "/", nil, 200, "hello"},
		"dead":             {host(dead, port), "/", nil, 502, gone(dead)},
		"paused":           {host(paused, port), "/", nil, 502, gone(paused)},
		"unknown":          {host(&box{id: sandbox.IDOf("?")}, port), "/", nil, 502, gone(&box{id: sandbox.IDOf("?")})},
		"port closed": {host(up, closed), "/", nil, 502, fmt.Sprintf(
			`{"sandboxId":"%s","message":"The sandbox is running but port is not open","port":%d,"code":502}`, up.id, closed)},
		"page for people": {host(dead, port), "/", []string{"User-Agent", "Mozilla/5.0", "Accept", "text/html,*/*"}, 502, "<!doctype html>…"},
		"JSON for fetch":  {host(dead, port), "/", []string{"User-Agent", "Mozilla/5.0", "Accept", "text/html", "Sec-Fetch-Mode", "cors"}, 502, gone(dead)},

		"internal":            {host(up, envd.Port), "/init", nil, 404, `{"message":"The path does not exist","path":"/init","code":404}`},
		"internal, disguised": {host(up, envd.Port), "//x/..//%49nit/", nil, 404, `{"message":"The path does not exist",…`},
		"internal by path":    {"127.0.0.1", fmt.Sprintf("/sandbox/%s/%d/internal/logs", up.id, envd.Port), nil, 404, `{"message":…`},
		"internal of dead":    {host(dead, envd.Port), "/freeze", nil, 404, `{"message":…`},
		"internal elsewhere":  {host(up, port), "/init", nil, 200, "hello"},

		"no token":    {host(shut, port), "/", nil, 403, fmt.Sprintf(`{"sandboxId":"%s","message":"The traffic…`, shut.id)},
		"wrong token": {host(shut, port), "/", []string{envd.HeaderTrafficToken, w.tokens.Traffic(up.id)}, 403, `{"sandboxId"…`},
		"agent token": {host(shut, port), "/", []string{envd.HeaderTrafficToken, w.tokens.Agent(shut.id)}, 403, `{"sandboxId"…`},
		"token":       {host(shut, port), "/", []string{envd.HeaderTrafficToken, w.tokens.Traffic(shut.id)}, 200, "hello"},

		"bad port":           {"x-" + string(up.id) + "." + testDomain, "/", nil, 400, "invalid port…"},
		"port too big":       {"65536-" + string(up.id) + "." + testDomain, "/", nil, 400, "invalid port…"},
		"bad ID":             {"80-abc." + testDomain, "/", nil, 400, "invalid sandbox ID…"},
		"bad label":          {"www." + testDomain, "/", nil, 400, "invalid host…"},
		"label too deep":     {host(up, port)[:27] + ".evil." + testDomain, "/", nil, 400, "invalid…"},
		"shared, no header":  {"sandbox." + testDomain, "/", nil, 400, "missing header E2b-Sandbox-Id\n"},
		"bad header ID":      {"127.0.0.1", "/", []string{envd.HeaderSandboxID, "x"}, 400, "invalid sandbox ID…"},
		"bad header port":    {"127.0.0.1", "/", []string{envd.HeaderSandboxID, string(up.id), envd.HeaderSandboxPort, "-1"}, 400, "invalid port…"},
		"header on a host":   {host(dead, port), "/", []string{envd.HeaderSandboxID, string(up.id)}, 502, gone(dead)},
		"header, other host": {"example.org", "/", []string{envd.HeaderSandboxID, string(up.id)}, 200, "the API"},
		"API":                {"api." + testDomain, "/", []string{envd.HeaderSandboxID, string(up.id)}, 200, "the API"},
		"API by address":     {"127.0.0.1:7700", "/sandboxes", nil, 200, "the API"},
		"API by domain":      {testDomain, "/", nil, 200, "the API"},
		"suffix only":        {"evil" + testDomain, "/", nil, 200, "the API"},

		"path":            {"localhost", fmt.Sprintf("/sandbox/%s/%d/", up.id, port), nil, 200, "hello"},
		"path, bad port":  {"localhost", fmt.Sprintf("/sandbox/%s/x/", up.id), nil, 400, "invalid port…"},
		"path, bad ID":    {"localhost", "/sandbox/x/1/", nil, 400, "invalid sandbox ID…"},
		"path, disguised": {"localhost", fmt.Sprintf("/sandbox%%2f%s/%d/", up.id, port), nil, 400, "invalid…"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, client := range []*http.Client{w.client, w.h2c} {
				res, text := w.do(client, http.MethodGet, "http://"+testDomain+c.path, nil, append(c.headers, "Host", c.host)...) //nolint:bodyclose // do closes it
				want, more := strings.CutSuffix(c.body, "…")
				if c.status != 400 && res.StatusCode != c.status || c.status == 400 && res.StatusCode != 400 ||
					!strings.HasPrefix(text, want) || (!more && strings.TrimSpace(text) != strings.TrimSpace(want)) {
					t.Errorf("%s: got %d %q, want %d %q", res.Proto, res.StatusCode, text, c.status, c.body)
				}
				ours := c.status != http.StatusOK
				if got := res.Header.Get("Access-Control-Allow-Origin"); (got == "*") != ours {
					t.Errorf("Access-Control-Allow-Origin is %q", got)
				}
			}
		})
	}
}

func TestByHeader(t *testing.T) {
	w := newFixture(t, func(c *Config) {
		c.Names = func(_ context.Context, namespace, name string) (sandbox.ID, bool) {
			return c.Routes.(*route.Table).LookupName(namespace, name)
		}
		c.KeyNamespace = func(_ context.Context, key string) (string, bool) { return "default", key == "key" }
	})
	port := backend(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Host) })
	b := w.box("named")
	portText := target.PortText(port)
	shared := fmt.Sprintf("%d-%s.%s", port, b.id, testDomain)
	for name, c := range map[string]struct {
		host    string
		headers []string
		status  int
		body    string
	}{
		"shared host":        {"sandbox." + testDomain, []string{envd.HeaderSandboxID, string(b.id), envd.HeaderSandboxPort, portText}, 200, shared},
		"address":            {"127.0.0.1:7700", []string{envd.HeaderSandboxID, string(b.id), envd.HeaderSandboxPort, portText}, 200, "127.0.0.1:7700"},
		"IPv6":               {"[::1]:7700", []string{envd.HeaderSandboxID, string(b.id), envd.HeaderSandboxPort, portText}, 200, "[::1]:7700"},
		"router":             {"router.svc", []string{target.HeaderName, "named", target.HeaderPort, portText, credentials.HeaderKey, "key"}, 200, "router.svc"},
		"router, by ID":      {"router.svc", []string{target.HeaderName, string(b.id), target.HeaderPort, portText}, 200, "router.svc"},
		"router, namespace":  {"router.svc", []string{target.HeaderName, "named", target.HeaderNamespace, "other", target.HeaderPort, portText, credentials.HeaderKey, "key"}, 401, ""},
		"router, bad name":   {"router.svc", []string{target.HeaderName, "../x", target.HeaderPort, portText}, 400, ""},
		"router, pod IP":     {"router.svc", []string{target.HeaderName, "nobody", headers.PodIP, "127.0.0.1", target.HeaderPort, portText, credentials.HeaderKey, "key"}, 502, ""},
		"router on sandbox.": {"sandbox." + testDomain, []string{target.HeaderName, "named", target.HeaderPort, portText}, 400, ""},
	} {
		t.Run(name, func(t *testing.T) {
			res, text := w.do(w.client, http.MethodGet, "http://x/", nil, append(c.headers, "Host", c.host)...) //nolint:bodyclose // do closes it
			if res.StatusCode != c.status || c.body != "" && text != c.body {
				t.Errorf("got %d %q, want %d %q", res.StatusCode, text, c.status, c.body)
			}
		})
	}
}

func TestHeadersOnTheirWay(t *testing.T) {
	w := newFixture(t)
	var seen http.Header
	var host string
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		seen, host = r.Header.Clone(), r.Host
		w.Header().Set("Connection", "X-Hop")
		w.Header().Set("X-Hop", "1")
		w.Header().Set("Keep-Alive", "timeout=5")
		w.Header().Add("Set-Cookie", "a=1")
		w.Header().Add("Set-Cookie", "b=2")
		w.Header()["Content-Type"] = nil
		_, _ = io.WriteString(w, "<html>")
	})
	b := w.box("a", func(s *agents.Sandbox) {
		private(s)
		s.Spec.Barchan.Access.MaskRequestHost = "localhost:${PORT}"
	})
	url := b.url(port, "/")
	res, _ := w.do(w.client, http.MethodGet, url, nil, envd.HeaderTrafficToken, w.tokens.Traffic(b.id), //nolint:bodyclose // do closes it
		"Connection", "X-Mine", "X-Mine", "1", "Proxy-Authorization", "secret", "X-Forwarded-For", "6.6.6.6", "Forwarded", "for=6.6.6.6",
		"X-Forwarded-Proto", "https", "X-Real-Ip", "6.6.6.6", "Upgrade", "h2c", "Http2-Settings", "AAAA", "X-Kept", "yes")
	for _, name := range []string{"X-Mine", "Proxy-Authorization", "Forwarded", "X-Real-Ip", envd.HeaderTrafficToken, "Upgrade", "Http2-Settings"} {
		if v := seen.Values(name); len(v) > 0 {
			t.Errorf("sandbox saw %s: %q", name, v)
		}
	}
	for name, want := range map[string]string{
		"X-Kept": "yes", "X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "http",
		"X-Forwarded-Host": strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/"),
	} {
		if got := seen.Values(name); len(got) != 1 || got[0] != want {
			t.Errorf("sandbox saw %s: %q, want %q", name, got, want)
		}
	}
	if want := "localhost:" + target.PortText(port); host != want {
		t.Errorf("sandbox saw host %q, want %q", host, want)
	}
	if res.Header.Get("X-Hop")+res.Header.Get("Keep-Alive")+res.Header.Get("Content-Type") != "" || len(res.Header.Values("Set-Cookie")) != 2 {
		t.Errorf("client saw %v", res.Header)
	}
}

func TestBeforeSync(t *testing.T) {
	w := newFixture(t, func(c *Config) { c.Routes = route.NewTable() })
	res, _ := w.do(w.client, http.MethodGet, fmt.Sprintf("http://80-%s.%s/", sandbox.IDOf("?"), testDomain), nil) //nolint:bodyclose // do closes it
	if res.StatusCode != http.StatusServiceUnavailable || res.Header.Get("Retry-After") == "" {
		t.Errorf("got %d, Retry-After %q", res.StatusCode, res.Header.Get("Retry-After"))
	}
}

// TestPortJustOpening refuses two connections before there is a listener.
func TestPortJustOpening(t *testing.T) {
	port := backend(t, hello)
	dialer := &lateDialer{closed: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), closedPort(t)).String(), open: fmt.Sprintf("127.0.0.1:%d", port)}
	w := newFixture(t, func(c *Config) { c.Dialer = dialer })
	b := w.box("a")
	if status, text := w.get(b.url(80, "/")); status != http.StatusOK || dialer.calls.Load() != 3 {
		t.Errorf("got %d %q after %d attempts", status, text, dialer.calls.Load())
	}
}

type lateDialer struct {
	net.Dialer
	calls        atomic.Int64
	closed, open string
}

func (d *lateDialer) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	if d.calls.Add(1) < 3 {
		return d.Dialer.DialContext(ctx, network, d.closed)
	}
	return d.Dialer.DialContext(ctx, network, d.open)
}

// TestServiceClosesIdleConnections has each connection closed after its first answer, without
// saying so. No request, not even one that may not be repeated, is to be lost by that.
func TestServiceClosesIdleConnections(t *testing.T) {
	w := newFixture(t)
	closed := make(chan struct{}, 1)
	port := rawService(t, func(c net.Conn) {
		buf := make([]byte, 4096)
		_, _ = c.Read(buf)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		_ = c.Close()
		closed <- struct{}{}
	})
	b := w.box("a")
	for i := range 20 {
		res, text := w.do(w.client, http.MethodPost, b.url(port, "/"), nil) //nolint:bodyclose // do closes it
		if res.StatusCode != http.StatusOK || text != "ok" {
			t.Fatalf("request %d got %d %q", i, res.StatusCode, text)
		}
		<-closed
	}
}

// rawService hands each connection to f, without HTTP.
func rawService(t *testing.T, f func(net.Conn)) uint16 {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f(c)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return portOf(t, l.Addr().String())
}

func TestOddAnswers(t *testing.T) {
	w := newFixture(t)
	b := w.box("a")
	for name, c := range map[string]struct {
		send   string
		status int
		body   string
	}{
		"nothing":             {"", 502, "closed the connection"},
		"not HTTP":            {"SSH-2.0-OpenSSH\r\n\r\n", 502, "no valid HTTP"},
		"bare 101":            {"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", 502, "no valid HTTP"},
		"endless head":        {"HTTP/1.1 200 OK\r\n" + strings.Repeat("X-A: "+strings.Repeat("a", 1000)+"\r\n", 1200), 502, "no valid HTTP"},
		"HTTP/1.0":            {"HTTP/1.0 200 OK\r\n\r\nold", 200, "old"},
		"early hints":         {"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, "ok"},
		"endless interim":     {strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", 50), 502, "no valid HTTP"},
		"two lengths":         {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk", 502, "no valid HTTP"},
		"two framings":        {"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 502, "no valid HTTP"},
		"framings, 103":       {"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n1\r\na\r\n0\r\n\r\n", 502, "no valid HTTP"},
		"bare line feeds":     {"HTTP/1.1 200 OK\nX-A: b\n c\nContent-Length: 2\n\nok", 200, "ok"},
		"more than announced": {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong", 200, "ok"},
	} {
		t.Run(name, func(t *testing.T) {
			closed := make(chan struct{}, 1)
			port := rawService(t, func(conn net.Conn) {
				_, _ = conn.Read(make([]byte, 4096))
				_, _ = io.WriteString(conn, c.send)
				_ = conn.Close()
				closed <- struct{}{}
			})
			for range 2 {
				res, text := w.do(w.client, http.MethodPost, b.url(port, "/"), nil) //nolint:bodyclose // do closes it
				if res.StatusCode != c.status || !strings.Contains(text, c.body) {
					t.Errorf("got %d %q, want %d %q", res.StatusCode, text, c.status, c.body)
				}
				<-closed // what crosses the close would be lost
			}
		})
	}
}

// TestUnusedConnectionsAreClosed waits until the service sees its only connection closed.
func TestUnusedConnectionsAreClosed(t *testing.T) {
	w := newFixture(t, func(c *Config) { c.ServiceIdle = 20 * time.Millisecond })
	ended := make(chan error, 1)
	port := rawService(t, func(c net.Conn) {
		buf := make([]byte, 4096)
		_, _ = c.Read(buf)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		_, err := c.Read(buf)
		ended <- err
	})
	if status, text := w.get(w.box("a").url(port, "/")); status != http.StatusOK || text != "ok" {
		t.Fatalf("got %d %q", status, text)
	}
	if err := <-ended; !errors.Is(err, io.EOF) {
		t.Errorf("the service saw %v, want the end", err)
	}
}

func TestAccessLogAndMetrics(t *testing.T) {
	var out strings.Builder
	registry := prometheus.NewRegistry()
	w := newFixture(t, func(c *Config) {
		c.AccessLog, c.Registerer = slog.New(slog.NewJSONHandler(&out, nil)), registry
	})
	port := backend(t, hello)
	b := w.box("a")
	if status, _ := w.get(b.url(port, "/x?signature=secret")); status != http.StatusOK {
		t.Fatal(status)
	}
	w.idle()
	if err := w.gateway.Drain(t.Context()); err != nil { // nothing writes the log any more
		t.Fatal(err)
	}
	for _, want := range []string{`"sandbox":"` + string(b.id), `"status":200`, `"bytes":5`, `"path":"/x"`, `"method":"GET"`, `"remote":"127.0.0.1:`, `"received":0`, `"first_byte":`, `"duration":`, `"user_agent":"Go-`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%s is not in %s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "secret") {
		t.Errorf("the log has a secret: %s", out.String())
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			got[f.GetName()] += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	for _, name := range []string{"barchan_gateway_requests_total", "barchan_gateway_first_byte_seconds", "barchan_gateway_dials_total"} {
		if got[name] != 1 {
			t.Errorf("%s is %v, want 1", name, got[name])
		}
	}
}

func TestPanicsAreContained(t *testing.T) {
	w := newFixture(t, func(c *Config) { c.Routes = panicky{} })
	if status, _ := w.get(fmt.Sprintf("http://80-%s.%s/", sandbox.IDOf("?"), testDomain)); status != http.StatusInternalServerError {
		t.Errorf("got %d", status)
	}
	if w.flying() != 0 {
		t.Error("the request is still counted")
	}
}

type panicky struct{}

func (panicky) Lookup(sandbox.ID) (*route.Entry, bool) { panic("odd") }
func (panicky) Synced() bool                           { return true }
func (panicky) All() iter.Seq[route.Route]             { return func(func(route.Route) bool) {} }

func FuzzTarget(f *testing.F) {
	id := string(sandbox.IDOf("x"))
	f.Add("80-"+id+"."+testDomain, "", "", "", "", "/")
	f.Add("127.0.0.1", id, "80", "", "", "/x")
	f.Add("[::1]:80", "", "", "name", "8888", "/")
	f.Add("localhost", "", "", "", "", "/sandbox/"+id+"/80/a%2Fb")
	g := &Gateway{domains: []string{testDomain, target.Localhost}, cfg: Config{Routes: route.NewTable()}}
	f.Fuzz(func(t *testing.T, host, headerID, headerPort, name, port, path string) {
		u, err := url.ParseRequestURI(path)
		if err != nil {
			return
		}
		r := &http.Request{Method: http.MethodGet, Host: host, URL: u, Header: http.Header{}}
		for k, v := range map[string]string{envd.HeaderSandboxID: headerID, envd.HeaderSandboxPort: headerPort, target.HeaderName: name, "X-Sandbox-Port": port} {
			if v != "" {
				r.Header.Set(k, v)
			}
		}
		to, kind, err := target.Of(r, g.domains, g.bySignature)
		if err != nil || kind == target.ForAPI {
			return
		}
		checkTarget(t, &exchange{g: g, r: r, Target: to})
	})
}

// checkTarget checks a target that is accepted.
func checkTarget(t *testing.T, x *exchange) {
	t.Helper()
	if x.Port == 0 {
		t.Error("port 0")
	}
	if x.Name != "" {
		return
	}
	if parsed, err := sandbox.ParseID(string(x.ID)); err != nil || parsed != x.ID {
		t.Errorf("ID %q", x.ID)
	}
	if x.prepare() != nil {
		return
	}
	if !plain(x.uri) || (x.uri[0] != '/' && x.uri != "*") || (x.Port == envd.Port && envd.IsInternal(x.url.Path)) {
		t.Errorf("request target %q", x.uri)
	}
	if again, err := url.ParseRequestURI(x.uri); err != nil || again.Path != x.url.Path {
		t.Errorf("sandbox would see %q, checked was %q", x.uri, x.url.Path)
	}
}

func TestSignedURLWithoutSandboxID(t *testing.T) {
	w := newFixture(t)
	id := w.box("files").id
	ask := func(signature string) target.Target {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1/files?path=a.txt&signature="+url.QueryEscape(signature), http.NoBody)
		got, _, err := target.Of(r, w.gateway.domains, w.gateway.bySignature)
		if err != nil && !errors.Is(err, envd.ErrSignatureInvalid) {
			t.Errorf("target = %v", err)
		}
		return got
	}
	good := envd.Sign("a.txt", envd.OpRead, "", w.tokens.Agent(id), nil)
	if got := ask(good); got.ID != id || got.Port != envd.Port {
		t.Errorf("target = %+v, want sandbox %s", got, id)
	}
	for name, bad := range map[string]string{
		"forged": "v1_forged", "of another": envd.Sign("a.txt", envd.OpRead, "", w.tokens.Agent("i0000000000000000000"), nil),
		"for writing": envd.Sign("a.txt", envd.OpWrite, "", w.tokens.Agent(id), nil), "for another file": envd.Sign("b.txt", envd.OpRead, "", w.tokens.Agent(id), nil),
	} {
		if got := ask(bad); got.ID != "" {
			t.Errorf("%s: routed to %s", name, got.ID)
		}
	}
}

// TestExpiredSignature: who has a URL that was good learns that its time is over.
func TestExpiredSignature(t *testing.T) {
	w := newFixture(t, func(c *Config) {
		c.Waker = wakerFunc(func(context.Context, sandbox.ID) error { return errors.New("it must not be woken") })
	})
	paused := w.box("paused", func(s *agents.Sandbox) { s.Spec.Barchan.Wake = &agents.WakePolicy{OnTraffic: true} })
	paused.sleep()
	paused.apply()
	past, future := time.Unix(1000, 0), time.Now().Add(time.Hour)
	query := func(signedFor, shown time.Time) string {
		return fmt.Sprintf("/files?path=a.txt&signature_expiration=%d&signature=%s", shown.Unix(),
			url.QueryEscape(envd.Sign("a.txt", envd.OpRead, "", w.tokens.Agent(paused.id), &signedFor)))
	}
	for name, c := range map[string]struct {
		url    string
		status int
		text   string
	}{
		"by host":         {paused.url(envd.Port, query(past, past)), 401, envd.ErrSignatureExpired.Error()},
		"by signature":    {"http://127.0.0.1" + query(past, past), 401, envd.ErrSignatureExpired.Error()},
		"forged, by host": {paused.url(envd.Port, query(past, future)), 403, "may not wake"},
		"forged":          {"http://127.0.0.1" + query(past, future), 401, envd.ErrSignatureInvalid.Error()},
	} {
		if status, text := w.get(c.url); status != c.status || !strings.Contains(text, c.text) {
			t.Errorf("%s: got %d %q, want %d %q", name, status, text, c.status, c.text)
		}
	}
}

// TestPreflights: a browser's question comes without tokens. It is answered where only requests with
// tokens pass, and reaches and wakes nothing; elsewhere the service answers it.
func TestPreflights(t *testing.T) {
	var reached atomic.Int64
	port := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		reached.Add(1)
		w.WriteHeader(http.StatusTeapot)
	})
	w := newFixture(t, func(c *Config) {
		c.Waker = wakerFunc(func(context.Context, sandbox.ID) error {
			reached.Add(1)
			return errors.New("it must not be woken")
		})
	})
	wakes := func(s *agents.Sandbox) { s.Spec.Barchan.Wake = &agents.WakePolicy{OnTraffic: true} }
	pausedBox := func(name string, change ...func(*agents.Sandbox)) *box {
		b := w.box(name, change...)
		b.sleep()
		b.apply()
		return b
	}
	closed := w.box("closed", private)
	ask := []string{"Origin", "https://a.test", "Access-Control-Request-Method", "PUT", "Access-Control-Request-Headers", "x-a,e2b-traffic-access-token"}
	for name, c := range map[string]struct {
		url     string
		headers []string
		status  int
		reaches bool
	}{
		"private":             {closed.url(port, "/"), ask, 204, false},
		"private, paused":     {pausedBox("a", private, wakes).url(port, "/"), ask, 204, false},
		"agent, paused":       {pausedBox("b", wakes).url(envd.Port, "/files"), ask, 204, false},
		"private, with token": {closed.url(port, "/"), append(ask, envd.HeaderTrafficToken, w.tokens.Traffic(closed.id)), 418, true},
		"public":              {w.box("open").url(port, "/"), ask, 418, true},
		"no preflight":        {closed.url(port, "/"), []string{"Origin", "https://a.test"}, 403, false},
		"no sandbox":          {fmt.Sprintf("http://80-%s.%s/", sandbox.IDOf("gone"), testDomain), ask, 502, false},
	} {
		before := reached.Load()
		res, text := w.do(w.client, http.MethodOptions, c.url, nil, c.headers...) //nolint:bodyclose // do closes it
		if res.StatusCode != c.status || (reached.Load() != before) != c.reaches {
			t.Errorf("%s: got %d %q, reached %v", name, res.StatusCode, text, reached.Load() != before)
		}
		h := res.Header
		if c.status == http.StatusNoContent && (h.Get("Access-Control-Allow-Origin") != "*" || h.Get("Access-Control-Allow-Methods") != "PUT" ||
			h.Get("Access-Control-Allow-Headers") != "x-a,e2b-traffic-access-token") {
			t.Errorf("%s: got %v", name, h)
		}
	}
}

// wakerFunc is a Waker.
type wakerFunc func(context.Context, sandbox.ID) error

func (f wakerFunc) Wake(ctx context.Context, id sandbox.ID) error { return f(ctx, id) }
