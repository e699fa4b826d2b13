package gateway

import (
	"bufio"
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// FuzzRequestHead parses any bytes as the server does and checks the head that a sandbox would be sent:
// it can be written, and a strict parser reads the same single request from it.
func FuzzRequestHead(f *testing.F) {
	host := "80-" + string(sandbox.IDOf("x")) + "." + testDomain
	for _, more := range []string{
		"", "Connection: X-A, close\r\nX-A: b\r\n", "Transfer-Encoding: chunked\r\nTrailer: X-T, Host\r\n", "Content-Length: 3\r\n",
		"Upgrade: websocket\r\nConnection: Upgrade\r\n", "X-A: b\r\n c\r\n", "Te: trailers\r\nX-Forwarded-For: 1.2.3.4\r\n",
		"Connection: Upgrade\r\nUpgrade: a\x00b\r\n", "Traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n",
	} {
		f.Add([]byte("POST /a%2Fb?c=d HTTP/1.1\r\nHost: " + host + "\r\n" + more + "\r\n"))
	}
	g := &Gateway{domains: []string{testDomain}, cfg: Config{Routes: route.NewTable()}}
	f.Fuzz(func(t *testing.T, head []byte) {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
		if err != nil || !served(r) {
			return
		}
		r.RemoteAddr = "192.0.2.1:1000"
		to, kind, err := target.Of(r, g.domains, g.bySignature)
		if err != nil || kind == target.ForAPI {
			return
		}
		x := &exchange{g: g, r: r, Target: to}
		if x.prepare() != nil {
			return
		}
		x.Host = r.Host
		compareBind(t, g, r, to)
		x.rc = http.NewResponseController(httptest.NewRecorder())
		u := &upstream{Endpoint: endpoint.New(&endpoint.Config{}, &route.Entry{Route: route.Route{Address: netip.MustParseAddr("192.0.2.2")}}, nil)}
		out := writtenHead(t, x.outgoing(t.Context(), u))
		checkRequest(t, out.String())
		again, err := http.ReadRequest(bufio.NewReader(out))
		if err != nil {
			t.Fatalf("a strict reader refuses it: %v", err)
		}
		if again.Method != r.Method || again.URL.Path != x.url.Path || again.Host != r.Host || again.ContentLength != r.ContentLength && r.ContentLength != 0 {
			t.Errorf("sandbox would read %s %s of %s with %d bytes", again.Method, again.URL, again.Host, again.ContentLength)
		}
		if got := again.Header["X-Forwarded-For"]; !slices.Equal(got, []string{"192.0.2.1"}) {
			t.Errorf("X-Forwarded-For is %q", got)
		}
	})
}

// unreadBody ends the writing of a request after its head.
type unreadBody struct{ reached bool }

func (b *unreadBody) Read([]byte) (int, error) {
	b.reached = true
	return 0, errors.New("end of the head")
}

func (*unreadBody) Close() error { return nil }

// writtenHead returns the head of a request as a transport writes it.
func writtenHead(t *testing.T, r *http.Request) *bytes.Buffer {
	t.Helper()
	body := &unreadBody{}
	if r.Body != nil {
		r.Body = body
	}
	out := &bytes.Buffer{}
	if err := r.Write(out); err != nil && !body.reached {
		t.Fatalf("a request that passed the checks cannot be written: %v", err)
	}
	return out
}

// compareBind: where the fast path goes by host and headers alone, the main path goes too.
func compareBind(t *testing.T, g *Gateway, r *http.Request, want target.Target) {
	t.Helper()
	got, ok := mainPath{g}.Bind(r.Host, r.Header.Get(envd.HeaderSandboxID), r.Header.Get(envd.HeaderSandboxPort))
	if ok && (got.ID != want.ID || got.Port != want.Port || want.Name != "" || want.Prefix != "") {
		t.Errorf("the fast path leads to %+v, the main path to %+v", got, want)
	}
}

// served is what net/http's server checks beyond what its parser does.
func served(r *http.Request) bool {
	if len(r.Header["Host"]) > 0 || !httpguts.ValidHostHeader(r.Host) {
		return false
	}
	for name, values := range r.Header {
		if !httpguts.ValidHeaderFieldName(name) || slices.ContainsFunc(values, func(v string) bool { return !httpguts.ValidHeaderFieldValue(v) }) {
			return false
		}
	}
	return true
}

// FuzzResponseHead reads any bytes as a sandbox's answer, and checks what a client would get.
func FuzzResponseHead(f *testing.F) {
	for _, more := range []string{
		"Content-Length: 3\r\n", "Transfer-Encoding: chunked\r\nTrailer: A\r\n", "Connection: X-Hop, close\r\nX-Hop: 1\r\n", "X-A:\r\n b\r\n",
	} {
		f.Add([]byte("HTTP/1.1 200 OK\r\n" + more + "\r\nabc"))
	}
	f.Fuzz(func(t *testing.T, head []byte) {
		res, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(head)), nil)
		if err != nil {
			return
		}
		_ = res.Body.Close()
		got := http.Header{}
		headers.CopyResponse(got, res.Header)
		for name := range got {
			if headers.IsHop(name) || slices.Contains(headers.Listed(res.Header), name) {
				t.Errorf("client would see %s", name)
			}
		}
		var out bytes.Buffer
		if err := got.Write(&out); err != nil {
			t.Fatal(err)
		}
		for line := range strings.SplitSeq(strings.TrimSuffix(out.String(), "\r\n"), "\r\n") {
			if strings.ContainsAny(line, "\r\n") {
				t.Errorf("line %q", line)
			}
		}
	})
}

// FuzzHost: only a host that is ours leads to a sandbox, and to the one that it names.
func FuzzHost(f *testing.F) {
	id := string(sandbox.IDOf("x"))
	for _, host := range []string{"80-" + id + "." + testDomain, "80-" + id + ".EVIL.", "[::1]:80", "a@" + testDomain, "80-" + id + "." + testDomain + ".:7700", ":80", "."} {
		f.Add(host)
	}
	g := &Gateway{domains: []string{testDomain}, cfg: Config{Routes: route.NewTable()}}
	f.Fuzz(func(t *testing.T, host string) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = host
		got, kind, err := target.Of(r, g.domains, g.bySignature)
		if err != nil || kind == target.ForAPI {
			return
		}
		name := strings.TrimSuffix(strings.ToLower(host), ".")
		if i := strings.LastIndexByte(name, ':'); i >= 0 {
			name = strings.TrimSuffix(name[:i], ".")
		}
		label, ok := strings.CutSuffix(name, "."+testDomain)
		if !ok || !strings.Contains(label, "-"+string(got.ID)) || strings.Contains(label, ".") || got.Port == 0 {
			t.Errorf("%q leads to port %d of %q", host, got.Port, got.ID)
		}
	})
}
