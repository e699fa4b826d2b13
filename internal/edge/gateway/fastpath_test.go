package gateway

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// fastPage is what the fast path holds of a request or response.
const fastPage = 16 << 10

// warmUps is how many requests fastConn makes.
const warmUps = 2

// fastPathFixture is a fixture in which a busy machine causes no fallback.
func fastPathFixture(t testing.TB, change ...func(*Config)) *fixture {
	t.Helper()
	if noFastPath {
		t.Skip("the fast path is off in this run")
	}
	return newFixture(t, append([]func(*Config){func(c *Config) { c.responseTime, c.ServiceIdle = time.Minute, time.Minute }}, change...)...)
}

// impatient makes the fast path wait for no response.
func impatient(c *Config) { c.responseTime = 1 }

// fastConn returns a client's connection that is on the fast path, and waits for a request.
func (w *fixture) fastConn(t testing.TB, b *box, port uint16) net.Conn {
	t.Helper()
	c := w.connect(t)
	for i := 0; i < warmUps || w.waiting() == 0 && w.gateway.cfg.responseTime < time.Minute; i++ { // the first opens a connection to the sandbox
		ask(t, c, "GET /warm HTTP/1.1\r\nHost: "+b.host(port)+"\r\n\r\n")
	}
	eventually.True(t, "the connection is on the fast path", func() bool { return w.waiting() > 0 })
	return c
}

// waiting is how many connections of the fast path wait for a request.
func (w *fixture) waiting() int {
	_, idle, _ := w.gateway.fast.Stats()
	return idle
}

// ask sends a request and reads the one answer to it.
func ask(t testing.TB, c net.Conn, request string) (status int, body string) {
	t.Helper()
	status, body, err := tryAsk(c, request)
	if err != nil {
		t.Fatalf("answer to %.60q: %v", request, err)
	}
	return status, body
}

// tryAsk is ask, for any goroutine.
func tryAsk(c net.Conn, request string) (status int, body string, err error) {
	if _, err := io.WriteString(c, request); err != nil {
		return 0, "", err
	}
	method, _, _ := strings.Cut(request, " ")
	in := bufio.NewReader(c)
	res, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	all, err := io.ReadAll(res.Body)
	if err == nil && in.Buffered() > 0 {
		err = errors.New("more than one")
	}
	return res.StatusCode, string(all), err
}

// TestFastPathKeeps lists which requests keep a connection on the fast path. All get a response.
func TestFastPathKeeps(t *testing.T) {
	w := fastPathFixture(t)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		switch r.URL.Path {
		case "/none":
			w.WriteHeader(http.StatusNoContent)
			return
		case "/big":
			_, _ = io.WriteString(w, strings.Repeat("x", 4*fastPage))
		case "/close":
			w.Header().Set("Connection", "close")
		}
		fmt.Fprintf(w, "%s %s %q", r.Method, r.RequestURI, body)
	})
	b := w.box("a")
	for _, c := range []struct {
		method, path, headers, body string
		keeps                       bool
	}{
		{"GET", "/", "", "", true},
		{"GET", "/a/b;c=d?e=%20f&g", "User-Agent: x\r\nCookie: a=b\r\ncookie: c=d\r\n", "", true},
		{"HEAD", "/", "Connection: keep-alive\r\n", "", true},
		{"POST", "/", "Content-Length: 3\r\n", "abc", true},
		{"POST", "/", "", "", true},
		{"DELETE", "/none", "", "", true},
		{"GET", "/close", "", "", true}, // whose connection to the sandbox is not kept
		{"GET", "/%61", "", "", false},
		{"GET", "//a", "", "", false},
		{"GET", "/big", "", "", false},
		{"POST", "/big", "Content-Length: 3\r\n", "abc", false},
		{"POST", "/", "Transfer-Encoding: chunked\r\n", "3\r\nabc\r\n0\r\n\r\n", false},
		{"PROPFIND", "/", "", "", false},
		{"GET", "/", "Te: trailers\r\n", "", false},
		{"GET", "/", "X-A:b\r\n", "", false},
		{"GET", "/", "X-Big: " + strings.Repeat("x", fastPage) + "\r\n", "", false},
		{"POST", "/", fmt.Sprintf("Content-Length: %d\r\n", fastPage), strings.Repeat("x", fastPage), false},
	} {
		t.Run(c.method+c.path+c.headers[:min(len(c.headers), 20)], func(t *testing.T) {
			conn := w.fastConn(t, b, port)
			w.idle()
			handed := w.handed()
			status, body := ask(t, conn, c.method+" "+c.path+" HTTP/1.1\r\nHost: "+b.host(port)+"\r\n"+c.headers+"\r\n"+c.body)
			plain := c.body
			if strings.HasPrefix(c.headers, "Transfer-Encoding") {
				plain = "abc"
			}
			want := fmt.Sprintf("%s %s %q", c.method, c.path, plain)
			if c.method == http.MethodHead || c.path == "/none" {
				want = ""
			}
			if c.path == "/big" {
				want = strings.Repeat("x", 4*fastPage) + want
			}
			if status/100 != 2 || body != want {
				t.Errorf("got %d %.80q, want %.80q", status, body, want)
			}
			if kept := w.handed() == handed; kept != c.keeps {
				t.Errorf("the connection stayed on the fast path: %v", kept)
			}
			if status, body := ask(t, conn, "GET /after HTTP/1.1\r\nHost: "+b.host(port)+"\r\n\r\n"); status != http.StatusOK || body != `GET /after ""` {
				t.Errorf("then got %d %q", status, body)
			}
			_ = conn.Close()
			eventually.True(t, "no fast connection is left", func() bool { return w.fastConnCount() == 0 })
		})
	}
}

// fastConns is how many connections are on the fast path.
func (w *fixture) fastConnCount() int {
	conns, _, _ := w.gateway.fast.Stats()
	return conns
}

// handed is how often a connection fell back from the fast path.
func (w *fixture) handed() int64 {
	_, _, fallbacks := w.gateway.fast.Stats()
	return fallbacks
}

// TestFastPathLate: a response that is too late for the fast path still arrives.
func TestFastPathLate(t *testing.T) {
	w := fastPathFixture(t, impatient)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s", r.Method, body)
	})
	b := w.box("a")
	c := w.connect(t)
	for i := range 200 {
		request, want := "GET / HTTP/1.1\r\nHost: "+b.host(port)+"\r\n\r\n", "GET "
		if i%2 == 0 {
			request, want = "POST / HTTP/1.1\r\nHost: "+b.host(port)+"\r\nContent-Length: 3\r\n\r\nabc", "POST abc"
		}
		if _, body := ask(t, c, request); body != want {
			t.Fatalf("got %q, want %q", body, want)
		}
	}
	if w.handed() == 0 {
		t.Error("no response was late")
	}
	w.idle()
}

// TestFastPathStreams: what a sandbox has sent reaches the client though more is to come, with a length or
// in chunks.
func TestFastPathStreams(t *testing.T) {
	w := fastPathFixture(t)
	more := make(chan struct{}, 1)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/length" {
			w.Header().Set("Content-Length", "10")
		}
		_, _ = io.WriteString(w, "first")
		if r.URL.Path != "/warm" {
			_ = http.NewResponseController(w).Flush()
			<-more
			_, _ = io.WriteString(w, " last")
		}
	})
	b := w.box("a")
	for _, path := range []string{"/length", "/chunks"} {
		c := w.fastConn(t, b, port)
		for range 3 {
			if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: "+b.host(port)+"\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			res, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatal(err)
			}
			var first [5]byte
			if _, err := io.ReadFull(res.Body, first[:]); err != nil || string(first[:]) != "first" {
				t.Fatalf("got %q, %v", first, err)
			}
			more <- struct{}{}
			if rest, err := io.ReadAll(res.Body); err != nil || string(rest) != " last" {
				t.Fatalf("then got %q, %v", rest, err)
			}
			_ = res.Body.Close()
		}
	}
}

// TestFastPathPipeline: requests sent at once are answered one by one, on the fast path and where it falls back.
func TestFastPathPipeline(t *testing.T) {
	w := fastPathFixture(t)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s%s", r.URL.Path, body)
	})
	b := w.box("a")
	c := w.fastConn(t, b, port)
	var all, want strings.Builder
	for i := range 300 {
		path := "/" + strings.Repeat("p", i)
		switch i % 50 {
		case 10:
			fmt.Fprintf(&all, "POST %s HTTP/1.1\r\nHost: %s\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", path, b.host(port))
		case 49:
			fmt.Fprintf(&all, "GET %s HTTP/1.1\r\nHost:%s\r\n\r\n", path, b.host(port))
		default:
			fmt.Fprintf(&all, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Length: 3\r\n\r\nabc", path, b.host(port))
		}
		fmt.Fprintf(&want, "200 %s", path)
		if i%50 != 49 {
			want.WriteString("abc")
		}
	}
	go func() {
		_, _ = io.WriteString(c, all.String()+"GET / HTTP/1.1\r\nHost: "+b.host(port)+"\r\nConnection: close\r\n\r\n")
	}()
	if got := strings.Join(answers(t, c), ""); got != want.String()+"200 /" {
		t.Errorf("got %d bytes, want %d", len(got), want.Len())
	}
}

// TestFastPathIsCounted: the access log and the metrics have the requests of the fast path.
func TestFastPathIsCounted(t *testing.T) {
	var out strings.Builder
	registry := prometheus.NewRegistry()
	w := fastPathFixture(t, func(c *Config) {
		c.AccessLog, c.Registerer = slog.New(slog.NewJSONHandler(&out, nil)), registry
	})
	port := backend(t, hello)
	b := w.box("a")
	c := w.fastConn(t, b, port)
	if w.fastConnCount() != 1 {
		t.Fatal("not on the fast path")
	}
	ask(t, c, "POST /x?signature=secret HTTP/1.1\r\nHost: "+b.host(port)+"\r\nUser-Agent: me\r\nContent-Length: 3\r\n\r\nabc")
	w.idle()
	if err := w.gateway.Drain(t.Context()); err != nil { // nothing writes the log any more
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != warmUps+1 {
		t.Fatalf("%d lines: %s", len(lines), out.String())
	}
	last := lines[warmUps]
	for _, want := range []string{`"sandbox":"` + string(b.id), `"status":200`, `"bytes":5`, `"path":"/x"`, `"method":"POST"`, `"remote":"127.0.0.1:`, `"received":3`, `"first_byte":`, `"duration":`, `"user_agent":"me"`, `"host":"` + b.host(port)} {
		if !strings.Contains(last, want) {
			t.Errorf("%s is not in %s", want, last)
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
			got[f.GetName()] += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	for name, want := range map[string]float64{"requests_total": warmUps + 1, "first_byte_seconds": warmUps + 1, "dials_total": 2 /* one for each path */, "in_flight": 0} {
		if name = telemetry.MetricsNamespace + "_gateway_" + name; got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
}

// TestFastPathRebinds: one connection may be for many sandboxes, and for the API.
func TestFastPathRebinds(t *testing.T) {
	w := fastPathFixture(t)
	name := func(text string) uint16 {
		return backend(t, func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, text, " ", r.Host, " ", r.Header.Get("X-Forwarded-Host"))
		})
	}
	one, two := name("one"), name("two")
	b := w.box("a")
	c := w.fastConn(t, b, one)
	w.fastConn(t, b, two)
	const api = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
	byHeader := fmt.Sprintf("GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: %s\r\nE2b-Sandbox-Port: %d\r\n\r\n", b.id, two)
	for range 3 {
		for _, step := range []struct{ request, want string }{
			{"GET / HTTP/1.1\r\nHost: " + b.host(two) + "\r\n\r\n", "two " + b.host(two) + " " + b.host(two)},
			{byHeader, "two localhost localhost"},
			{"GET / HTTP/1.1\r\nHost: " + b.host(one) + "\r\n\r\n", "one " + b.host(one) + " " + b.host(one)},
			{api, "the API"},
			{byHeader, "two localhost localhost"},
		} {
			if _, body := ask(t, c, step.request); body != step.want {
				t.Errorf("got %q, want %q", body, step.want)
			}
		}
	}
}

// TestFastPathPrivate: each request on the fast path shows the token, or is refused.
func TestFastPathPrivate(t *testing.T) {
	w := fastPathFixture(t)
	port := backend(t, hello)
	b := w.box("a")
	c := w.fastConn(t, b, port)
	private(b.Sandbox)
	b.apply()
	request := func(token string) string {
		return "GET / HTTP/1.1\r\nHost: " + b.host(port) + "\r\n" + token + "\r\n"
	}
	right := "E2b-Traffic-Access-Token: " + w.tokens.Traffic(b.id) + "\r\n"
	for range 3 {
		for _, step := range []struct {
			token string
			want  int
		}{{right, http.StatusOK}, {"", http.StatusForbidden}, {"E2b-Traffic-Access-Token: x\r\n", http.StatusForbidden}, {right, http.StatusOK}} {
			if status, body := ask(t, c, request(step.token)); status != step.want {
				t.Errorf("with %q got %d %s", step.token, status, body)
			}
		}
	}
}
