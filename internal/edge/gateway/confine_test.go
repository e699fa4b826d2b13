package gateway

import (
	"bufio"
	"fmt"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"testing"

	"github.com/barchan-dev/barchan/internal/edge/gateway/confine"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// greedy is a service that sets what reaches beyond its path.
func greedy(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Clear-Site-Data", `"cookies"`)
	h.Set("Service-Worker-Allowed", "/")
	h.Set("Strict-Transport-Security", "max-age=1000000")
	h.Set("Set-Cookie", "session=mine; Domain=example.com; Path=/")
	if r.URL.Path == "/early" {
		w.WriteHeader(http.StatusEarlyHints)
	}
	if r.Header.Get("Upgrade") != "" {
		h.Set("Connection", "Upgrade")
		h.Set("Upgrade", r.Header.Get("Upgrade"))
		w.WriteHeader(http.StatusSwitchingProtocols)
		return
	}
	_, _ = fmt.Fprint(w, "<script>steal()</script>")
}

func wantConfined(t *testing.T, h http.Header, cookie string) {
	t.Helper()
	for _, name := range []string{"Clear-Site-Data", "Service-Worker-Allowed", "Strict-Transport-Security"} {
		if h.Get(name) != "" {
			t.Errorf("%s: %s", name, h.Get(name))
		}
	}
	if got := h.Get("Set-Cookie"); got != cookie {
		t.Errorf("cookie %q, want %q", got, cookie)
	}
	if got := h.Get("Content-Security-Policy"); got != confine.Policy {
		t.Errorf("policy %q", got)
	}
}

// A sandbox that is reached by path shares its origin with others, and controls none of their pages.
func TestPathFormIsConfined(t *testing.T) {
	w := newFixture(t)
	port := backend(t, greedy)
	b := w.box("a")
	prefix := fmt.Sprintf("/sandbox/%s/%d", b.id, port)
	byPath := "http://127.0.0.1" + prefix
	for name, c := range map[string]*http.Client{"HTTP/1.1": w.client, "HTTP/2": w.h2c} {
		for range 3 { // the fast path serves no first request
			res, _ := w.do(c, http.MethodGet, byPath+"/page", nil)
			t.Run(name, func(t *testing.T) { wantConfined(t, res.Header, "session=mine; Path="+prefix+"/") })
		}
		res, _ := w.do(c, http.MethodGet, byPath+"/sw.js", nil, "Service-Worker", "script") //nolint:bodyclose // do closes it
		if res.StatusCode != http.StatusForbidden {
			t.Errorf("%s: script of a service worker: %d", name, res.StatusCode)
		}
	}
	for range 3 { // a host is an origin of its own
		res, _ := w.do(w.client, http.MethodGet, b.url(port, "/page"), nil, "Service-Worker", "script") //nolint:bodyclose // do closes it
		if h := res.Header; res.StatusCode != http.StatusOK || h.Get("Service-Worker-Allowed") != "/" || h.Get("Content-Security-Policy") != "" {
			t.Errorf("by host: %d %v", res.StatusCode, h)
		}
	}
}

// Responses before the final one, and those that begin a WebSocket, set cookies too.
func TestPathFormIsConfinedBeforeTheBody(t *testing.T) {
	w := newFixture(t)
	port := backend(t, greedy)
	b := w.box("a")
	prefix := fmt.Sprintf("/sandbox/%s/%d", b.id, port)
	var early http.Header
	trace := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
		early = http.Header(h)
		return nil
	}})
	req, err := http.NewRequestWithContext(trace, http.MethodGet, "http://127.0.0.1"+prefix+"/early", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := w.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	wantConfined(t, early, "session=mine; Path="+prefix+"/")

	conn := w.connect(t)
	if _, err := fmt.Fprintf(conn, "GET %s/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", prefix); err != nil {
		t.Fatal(err)
	}
	res, err = http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(res, err)
	}
	_ = res.Body.Close()
	wantConfined(t, res.Header, "session=mine; Path="+prefix+"/")
}

// A page's script can name its sandbox in a header too; programs without an Origin are no browsers.
func TestScriptsByHeaderAreConfined(t *testing.T) {
	w := newFixture(t)
	port := backend(t, greedy)
	b := w.box("a")
	named := []string{envd.HeaderSandboxID, string(b.id), envd.HeaderSandboxPort, target.PortText(port)}
	for range 3 {
		res, _ := w.do(w.client, http.MethodGet, "http://127.0.0.1/", nil, append(named, "Origin", "null")...) //nolint:bodyclose // do closes it
		wantConfined(t, res.Header, "")
		res, _ = w.do(w.client, http.MethodGet, "http://127.0.0.1/", nil, named...) //nolint:bodyclose // do closes it
		if res.Header.Get("Set-Cookie") == "" {
			t.Error("a program without an origin got no cookie")
		}
	}
}

// Files of sandboxes are served at the gateway's own origin too, if a signature names the sandbox.
func TestSignedFilesAreConfined(t *testing.T) {
	dialer := &portDialer{agent: fmt.Sprintf("127.0.0.1:%d", backend(t, greedy))}
	w := newFixture(t, func(c *Config) { c.Dialer = dialer })
	b := w.box("a")
	query := url.Values{envd.QueryPath: {"/page.html"}, envd.QuerySignature: {envd.Sign("/page.html", envd.OpRead, "", w.tokens.Agent(b.id), nil)}}
	for range 3 {
		res, _ := w.do(w.client, http.MethodGet, "http://127.0.0.1"+envd.PathFiles+"?"+query.Encode(), nil) //nolint:bodyclose // do closes it
		wantConfined(t, res.Header, "")
	}
}
