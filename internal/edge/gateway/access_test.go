package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/edge/gateway/ratelimit"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestSignedURL: a signature passes for one sandbox, one port and until its time, and its cookie
// after it; the sandbox sees neither.
func TestSignedURL(t *testing.T) {
	w := newFixture(t)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s cookies=%q", r.RequestURI, r.Header["Cookie"])
	})
	b, other, open := w.box("a", private), w.box("b", private), w.box("c")
	token := w.tokens.Traffic(b.id)
	good := signedurl.Query(token, port, time.Now().Add(time.Minute))
	text := good.Encode()
	past := signedurl.Query(token, port, time.Now().Add(-time.Second)).Encode()
	later := strings.Replace(text, good.Get(signedurl.QueryExpires), fmt.Sprint(time.Now().Add(time.Hour).Unix()), 1)
	cookie := headers.CookieAccess + "=" + good.Get(signedurl.QueryExpires) + "." + good.Get(signedurl.QuerySignature)
	path := fmt.Sprintf("/sandbox/%s/%d", b.id, port)
	for name, c := range map[string]struct {
		box     *box
		path    string
		headers []string
		status  int
		body    string
		cookie  bool
	}{
		"signed":              {b, "/x?" + text, nil, 200, `/x cookies=[]`, true},
		"among others":        {b, "/x?a=1;2&" + text + "&b=%2F", nil, 200, `/x?a=1;2&b=%2F cookies=[]`, true},
		"no signature":        {b, "/x", nil, 403, "", false},
		"expired":             {b, "/x?" + past, nil, 403, "", false},
		"another expiry":      {b, "/x?" + later, nil, 403, "", false},
		"no expiry":           {b, "/x?" + signedurl.QuerySignature + "=" + good.Get(signedurl.QuerySignature), nil, 403, "", false},
		"empty":               {b, "/x?" + signedurl.QuerySignature + "=&" + signedurl.QueryExpires + "=", nil, 403, "", false},
		"of another sandbox":  {other, "/x?" + text, nil, 403, "", false},
		"of another port":     {b, "/x?" + signedurl.Query(token, port+1, time.Now().Add(time.Minute)).Encode(), nil, 403, "", false},
		"by another token":    {b, "/x?" + signedurl.Query(w.tokens.Agent(b.id), port, time.Now().Add(time.Minute)).Encode(), nil, 403, "", false},
		"cookie":              {b, "/x", []string{"Cookie", "a=b; " + cookie + "; c=d"}, 200, `/x cookies=["a=b; c=d"]`, false},
		"dashboard's session": {open, "/x", []string{"Cookie", "a=b; " + headers.CookieUI + "=secret; c=d"}, 200, `/x cookies=["a=b; c=d"]`, false},
		"cookie alone":        {b, "/x", []string{"Cookie", cookie}, 200, `/x cookies=[]`, false},
		"cookie, other box":   {other, "/x", []string{"Cookie", cookie}, 403, "", false},
		"cookie, cut":         {b, "/x", []string{"Cookie", cookie[:len(cookie)-1]}, 403, "", false},
		"stale, then good":    {b, "/x", []string{"Cookie", headers.CookieAccess + "=1.v1_x; " + cookie}, 200, `/x cookies=[]`, false},
		"wrong token as well": {b, "/x?" + text, []string{envd.HeaderTrafficToken, "wrong"}, 403, "", false},
		"public":              {open, "/x?" + text, nil, 200, `/x cookies=[]`, false},
		"by path":             {nil, path + "/x?" + text, nil, 200, `/x cookies=[]`, true},
		"by header":           {nil, "/x?" + text, []string{envd.HeaderSandboxID, string(b.id), envd.HeaderSandboxPort, target.PortText(port)}, 200, `/x cookies=[]`, false},
	} {
		t.Run(name, func(t *testing.T) {
			url := "http://127.0.0.1" + c.path
			if c.box != nil {
				url = c.box.url(port, c.path)
			}
			res, body := w.do(w.client, http.MethodGet, url, nil, c.headers...) //nolint:bodyclose // do closes it
			if res.StatusCode != c.status || c.body != "" && body != c.body {
				t.Errorf("got %d %q, want %d %q", res.StatusCode, body, c.status, c.body)
			}
			set := res.Cookies()
			if c.cookie != (len(set) == 1) {
				t.Fatalf("cookies %v", set)
			}
			if !c.cookie {
				return
			}
			if !set[0].HttpOnly || set[0].Domain != "" || set[0].Expires.Unix() > time.Now().Add(time.Minute).Unix() || c.box == nil && set[0].Path != path+"/" {
				t.Errorf("cookie %v", set[0])
			}
			again, _, _ := strings.Cut(url, "?")
			if status, body := w.get(again, "Cookie", set[0].Name+"="+set[0].Value); status != http.StatusOK {
				t.Errorf("with the cookie: %d %s", status, body)
			}
		})
	}
}

// TestRequestsInProgress holds as many requests open as may be: another one gets 429, and another sandbox is not touched.
func TestRequestsInProgress(t *testing.T) {
	const most = 3
	w := newFixture(t, func(c *Config) { c.SandboxRequests = most })
	release := make(chan struct{})
	port := backend(t, func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hold" {
			<-release
		}
		hello(rw, r)
	})
	full, other := w.box("full"), w.box("other")
	var held sync.WaitGroup
	for range most {
		held.Go(func() {
			if status, _ := w.get(full.url(port, "/hold")); status != http.StatusOK {
				t.Errorf("a held request got %d", status)
			}
		})
	}
	eventually.True(t, "all are in progress", func() bool { return w.trafficOf(full).Count() == most })
	for range 2 {
		if status, body := w.get(full.url(port, "/")); status != http.StatusTooManyRequests {
			t.Errorf("one more got %d %s", status, body)
		}
		if status, body := w.get(other.url(port, "/")); status != http.StatusOK {
			t.Errorf("another sandbox returned %d %s", status, body)
		}
	}
	close(release)
	held.Wait()
	if status, body := w.get(full.url(port, "/")); status != http.StatusOK {
		t.Errorf("afterwards it returned %d %s", status, body)
	}
}

// TestRates: what is beyond a rate gets 429 and when to come again; others are not touched by it.
func TestRates(t *testing.T) {
	w := newFixture(t, func(c *Config) {
		c.SandboxRate, c.KeyRate = 2, 3
		c.KeyNamespace = func(_ context.Context, key string) (string, bool) {
			return "default", !strings.HasPrefix(key, "forged")
		}
	})
	port := backend(t, hello)
	own := w.box("own", func(s *agents.Sandbox) { s.Spec.Barchan.Access = &agents.AccessPolicy{RequestsPerSecond: 5} })
	for name, c := range map[string]struct {
		url     string
		headers []string
		burst   int
	}{
		"gateway's":   {w.box("a").url(port, "/"), nil, 2},
		"its own":     {own.url(port, "/"), nil, 5},
		"key":         {"http://api." + testDomain + "/", []string{"X-API-Key", "e2b_1"}, 3},
		"other key":   {"http://api." + testDomain + "/", []string{"Authorization", "Bearer e2b_2"}, 3},
		"forged key":  {"http://api." + testDomain + "/", []string{"X-API-Key", "forged"}, 0},
		"no key":      {"http://api." + testDomain + "/", nil, 0},
		"another box": {w.box("b").url(port, "/"), nil, 2},
	} {
		passed, refused := 0, 0
		for range 1000 {
			res, text := w.do(w.client, http.MethodGet, c.url, nil, c.headers...) //nolint:bodyclose // do closes it
			if res.StatusCode == http.StatusOK {
				passed++
			} else if res.StatusCode != http.StatusTooManyRequests || res.Header.Get("Retry-After") != "1" {
				t.Fatalf("%s: got %d %s, Retry-After %q", name, res.StatusCode, text, res.Header.Get("Retry-After"))
			} else {
				refused++
			}
			if c.burst > 0 && refused > 0 || passed > 200 {
				break
			}
		}
		if passed < c.burst || (refused > 0) != (c.burst > 0) {
			t.Errorf("%s: %d passed, %d refused", name, passed, refused)
		}
	}
	counted := func() int {
		return w.gateway.keys.Size()
	}
	if n := counted(); n != 2 {
		t.Errorf("%d keys are remembered, want the two that exist", n)
	}
	for i := range 3 * ratelimit.MaxLimiters {
		w.gateway.keys.Take(t.Context(), fmt.Sprint("true ", i))
	}
	if n := w.gateway.keys.Size(); n > 2*ratelimit.MaxLimiters {
		t.Errorf("%d keys are remembered", n)
	}
}

// TestTraces continues the caller's trace, with a span of ours where tracing is on.
func TestTraces(t *testing.T) {
	const traceID, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	for name, on := range map[string]bool{"off": false, "on": true} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t, func(c *Config) {
				if on {
					c.Tracing = sdktrace.NewTracerProvider()
				}
			})
			port := backend(t, func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprint(w, strings.Join(r.Header["Traceparent"], "|"), " ", strings.Join(r.Header["Tracestate"], "|"), " ", strings.Join(r.Header["Baggage"], "|"))
			})
			b := w.box("a")
			_, got := w.get(b.url(port, "/"), "Traceparent", "00-"+traceID+"-"+parent+"-01", "Tracestate", "x=y", "Baggage", "a=b")
			if same := got == "00-"+traceID+"-"+parent+"-01 x=y a=b"; same == on || !strings.HasPrefix(got, "00-"+traceID+"-") || !strings.HasSuffix(got, "-01 x=y a=b") {
				t.Errorf("the sandbox saw %q", got)
			}
			if _, got := w.get(b.url(port, "/")); on != strings.HasPrefix(got, "00-") {
				t.Errorf("without a caller's: %q", got)
			}
		})
	}
}

// TestStreamIdle ends what does not move; TestStreamThatMoves has the rest.
func TestStreamIdle(t *testing.T) {
	w := newFixture(t, func(c *Config) { c.StreamIdle = 200 * time.Millisecond })
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/ws":
			echoWebSocket(w, r)
			return
		case "/begins":
			_, _ = io.WriteString(w, ".")
			_ = http.NewResponseController(w).Flush()
		}
		<-r.Context().Done()
	})
	b := w.box("a")
	for name, c := range w.clients(t) {
		for _, contentType := range []string{"text/plain", "application/grpc"} {
			for path, want := range map[string]string{"/silent": "504", "/begins": "broken"} {
				var got string
				eventually.True(t, "it has begun in time", func() bool { // which a busy machine may not
					got = outcomeOf(t, c, b.url(port, path), contentType)
					return got != "504" || want == "504"
				})
				if got != want {
					t.Errorf("%s %s%s: got %q, want %q", name, contentType, path, got, want)
				}
			}
		}
	}
	eventually.True(t, "a WebSocket has begun in time", func() bool {
		conn := w.connect(t)
		fmt.Fprintf(conn, "GET /ws HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
			b.host(port))
		in := bufio.NewReader(conn)
		res, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode == http.StatusGatewayTimeout {
			return false
		}
		if _, err := io.ReadAll(in); errors.Is(err, os.ErrDeadlineExceeded) || res.StatusCode != http.StatusSwitchingProtocols {
			t.Errorf("got %d, then %v", res.StatusCode, err)
		}
		return true
	})
	w.idle()
}

// outcomeOf is the body of an answer, or its status if that is not 200, or that it broke off.
func outcomeOf(t *testing.T, c *http.Client, url, contentType string) string {
	t.Helper()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	req.Header.Set("Content-Type", contentType)
	res, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	switch {
	case err != nil:
		return "broken"
	case res.StatusCode != http.StatusOK:
		return fmt.Sprint(res.StatusCode)
	}
	return string(text)
}

// FuzzSignedPass: no query and no cookie passes, and nothing of ours reaches the sandbox.
func FuzzSignedPass(f *testing.F) {
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		f.Fatal(err)
	}
	id := sandbox.IDOf("x")
	good := signedurl.Query(tokens.Traffic(id), 81, time.Now().Add(time.Hour)) // for another port
	f.Add(good.Encode(), headers.CookieAccess+"="+good.Get(signedurl.QueryExpires)+"."+good.Get(signedurl.QuerySignature))
	f.Add("a=b&"+signedurl.QuerySignature+"=&"+signedurl.QueryExpires+"&c", "a; b=c; "+headers.CookieAccess+"=.")
	g := &Gateway{cfg: Config{Tokens: tokens}}
	f.Fuzz(func(t *testing.T, query, cookie string) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r.URL.RawQuery = query
		r.Header.Set("Cookie", cookie)
		x := &exchange{g: g, r: r, Target: target.Target{ID: id, Port: 80}}
		if x.prepare() != nil {
			return
		}
		if x.mayPass(false) {
			t.Errorf("%q and %q pass", query, cookie)
		}
		for part := range strings.SplitSeq(x.url.RawQuery, "&") {
			if name, _, _ := strings.Cut(part, "="); name == signedurl.QuerySignature {
				t.Errorf("the sandbox sees %q", x.url.RawQuery)
			}
		}
	})
}
