package fastpath

import (
	"bufio"
	"bytes"
	"io"
	"maps"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// TestKindsOfHeaders: what is known not to pass does not pass on the fast path.
func TestKindsOfHeaders(t *testing.T) {
	for _, name := range []string{
		"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding",
		"Upgrade", "Http2-Settings", "Host", "Content-Length", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto",
		"X-Forwarded-Port", "X-Forwarded-Prefix", "X-Real-Ip", headers.PodIP, envd.HeaderTrafficToken,
	} {
		if !headers.IsHop(name) && !headers.IsGateways(name) {
			t.Errorf("%s is not special any more", name)
		}
		var h requestHead
		if h.field([]byte(name), []byte("x"), nil) && len(h.lines) > 0 {
			t.Errorf("%s passes in a request", name)
		}
		var a responseHead
		if headers.IsHop(name) && a.field([]byte(name), []byte("x"), nil) && len(a.lines) > 0 {
			t.Errorf("%s passes in a response", name)
		}
	}
	for _, name := range []string{headers.Name, headers.Namespace, headers.Port, "Expect", "Te", "Upgrade", "Transfer-Encoding"} {
		var h requestHead
		if h.field([]byte(name), []byte("x"), nil) {
			t.Errorf("%s does not fall back", name)
		}
	}
	for _, name := range []string{"Host", "Content-Length", envd.HeaderSandboxID, envd.HeaderSandboxPort, envd.HeaderTrafficToken} {
		h := requestHead{length: -1}
		if !h.field([]byte(name), []byte("1"), nil) || h.field([]byte(name), []byte("1"), nil) {
			t.Errorf("%s may not come once, or may come twice", name)
		}
	}
}

// FuzzRequest parses any bytes: what the fast path takes, the server of net/http takes for
// the same request, and the sandbox is sent the same.
func FuzzRequest(f *testing.F) {
	host := "80-" + string(sandbox.IDOf("x")) + "." + "box.test"
	for _, more := range []string{
		"", "Connection: keep-alive\r\nX-A: b\r\n", "Transfer-Encoding: chunked\r\nTrailer: X-T, Host\r\n", "Content-Length: 3\r\n",
		"Upgrade: websocket\r\nConnection: Upgrade\r\n", "X-A: b\r\n c\r\n", "Te: trailers\r\nX-Forwarded-For: 1.2.3.4\r\n",
		"E2b-Sandbox-Id: a\r\nE2b-Sandbox-Port: 80\r\n", "cookie: a=b\r\nCOOKIE: c=d\r\n", "Content-Length: 3\r\nContent-Length: 3\r\n",
		"X-Real-IP: 1.2.3.4\r\nforwarded: for=x\r\nUser-agent: a/b (c)\r\n", "X-A: \r\nX-B: \xff\xfe\r\n",
	} {
		f.Add([]byte("POST /a/b;c?e=%2F HTTP/1.1\r\nHost: " + host + "\r\n" + more + "\r\nabc"))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		l := &conn{ip: "192.0.2.1"}
		h := &l.request
		sent := bytes.Clone(text)
		if h.parse(sent) != complete || len(text) < h.size+h.length {
			return
		}
		in := bufio.NewReader(bytes.NewReader(text))
		r, err := http.ReadRequest(in)
		if err != nil || !served(r) {
			t.Fatalf("net/http does not take it: %v", err)
		}
		body, err := io.ReadAll(r.Body)
		if err != nil || len(body) != h.length {
			t.Fatalf("net/http reads a body of %d bytes, not %d: %v", len(body), h.length, err)
		}
		if rest, _ := io.ReadAll(in); !bytes.Equal(rest, text[h.size+h.length:]) {
			t.Fatalf("net/http sees the next request at %q", rest)
		}
		compareHeads(t, h, r)
		l.bound.target.Host = r.Host
		compareSent(t, r, l.appendHead(nil))
	})
}

func compareHeads(t *testing.T, h *requestHead, r *http.Request) {
	t.Helper()
	if r.Method != string(h.method) || r.RequestURI != string(h.uri) || r.Host != string(h.host) || r.URL.Path != string(h.path()) ||
		r.ProtoMajor != 1 || r.ProtoMinor != 1 || r.Close || len(r.TransferEncoding) > 0 || len(r.Trailer) > 0 || r.UserAgent() != h.userAgent() {
		t.Fatalf("net/http reads %+v", r)
	}
	if r.Header.Get(envd.HeaderSandboxID) != string(h.sandboxID) || r.Header.Get(envd.HeaderSandboxPort) != string(h.sandboxPort) || r.Header.Get(envd.HeaderTrafficToken) != string(h.traffic) {
		t.Fatalf("net/http reads headers %q", r.Header)
	}
}

// compareSent compares what the sandbox is sent with what the rules of the main path leave of r.
func compareSent(t *testing.T, r *http.Request, head []byte) {
	t.Helper()
	again, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
	if err != nil {
		t.Fatalf("net/http does not take %q: %v", head, err)
	}
	want := http.Header{}
	for name, values := range r.Header {
		if !headers.IsHop(name) && !headers.IsGateways(name) {
			want[name] = values
		}
	}
	want.Set("X-Forwarded-For", "192.0.2.1")
	want.Set("X-Forwarded-Host", r.Host)
	want.Set("X-Forwarded-Proto", "http")
	delete(again.Header, "Content-Length")
	if again.Method != r.Method || again.RequestURI != r.RequestURI || again.Host != r.Host || again.ContentLength != r.ContentLength ||
		!maps.EqualFunc(again.Header, want, slices.Equal) {
		t.Fatalf("the sandbox is sent %q, want %v", head, want)
	}
}

// served is what net/http's server requires beyond its parser.
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

// FuzzResponse parses any bytes: the responses that the fast path takes, net/http takes for the
// same, and what the client is sent is the same again.
func FuzzResponse(f *testing.F) {
	for _, more := range []string{
		"Content-Length: 3\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", "Connection: close\r\nContent-Length: 0\r\n\r\n",
		"Date: x\r\nkeep-alive: a\r\nSet-Cookie: a\r\nset-cookie: b\r\nContent-Length: 1\r\n\r\nabc", "\r\nabc",
	} {
		f.Add([]byte("HTTP/1.1 200 OK\r\n"+more), 0)
		f.Add([]byte("HTTP/1.1 304\r\n"+more), 1)
	}
	f.Fuzz(func(t *testing.T, text []byte, pick int) {
		methods := []string{http.MethodGet, http.MethodHead, http.MethodPost}
		method := methods[uint(pick)%uint(len(methods))]
		l := &conn{}
		a := &l.response
		got := bytes.Clone(text)
		if a.parse(got, []byte(method)) != complete {
			return
		}
		end := a.size + a.body
		first := readResponse(t, text[:end], method)
		if first.rest != "" || len(first.body) != a.content || first.status != a.status {
			t.Fatalf("net/http reads %+v", first)
		}
		compareAnswer(t, a, first, l.appendResponse(nil, got[a.size:end], false), method)
	})
}

// compareAnswer compares what a client is sent with what net/http read of the sandbox's answer.
func compareAnswer(t *testing.T, a *responseHead, first readOff, sent []byte, method string) {
	t.Helper()
	for _, line := range strings.Split(string(sent[:bytes.Index(sent, []byte("\r\n\r\n"))]), "\r\n")[1:] {
		if name, _, ok := strings.Cut(line, ": "); !ok || name != textproto.CanonicalMIMEHeaderKey(name) || (headers.IsHop(name) && name != "Transfer-Encoding") {
			t.Fatalf("the client is sent %q", line)
		}
	}
	again := readResponse(t, sent, method)
	for name := range first.header {
		if headers.IsHop(name) {
			delete(first.header, name)
		}
	}
	if !a.dated {
		delete(again.header, "Date")
	}
	if again.rest != "" || again.body != first.body || again.status != first.status || len(again.header) != len(first.header) {
		t.Fatalf("the client reads %+v, want %+v", again, first)
	}
	for name, values := range first.header {
		if !slices.Equal(values, again.header[name]) {
			t.Fatalf("the client reads %s %q, want %q", name, again.header[name], values)
		}
	}
}

type readOff struct {
	status     int
	header     http.Header
	body, rest string
}

func readResponse(t *testing.T, text []byte, method string) readOff {
	t.Helper()
	in := bufio.NewReader(bytes.NewReader(text))
	res, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("net/http does not take %q: %v", text, err)
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("net/http does not take the body of %q: %v", text, err)
	}
	rest, _ := io.ReadAll(in)
	return readOff{res.StatusCode, res.Header, string(body), string(rest)}
}
