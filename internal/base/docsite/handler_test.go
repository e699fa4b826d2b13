package docsite

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
)

// answer is a response that has been read.
type answer struct {
	status int
	header http.Header
	body   string
}

// ask sends a request with pairs of headers, and follows no redirect.
func ask(t *testing.T, method, url string, header ...string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{res.StatusCode, res.Header, string(body)}
}

func TestHandler(t *testing.T) {
	srv := httptest.NewServer(Handler())
	defer srv.Close()
	for name, tt := range map[string]struct {
		method, path string
		status       int
		kind, body   string
	}{
		"bare":       {"GET", "/docs", 302, "text/html; charset=utf-8", ""},
		"first page": {"GET", "/docs/", 200, "text/html; charset=utf-8", "<h1"},
		"page":       {"GET", "/docs/memory.html", 200, "text/html; charset=utf-8", "<h1"},
		"decisions":  {"GET", "/docs/adr/", 200, "text/html; charset=utf-8", "Finer layers"},
		"script":     {"GET", "/docs/assets/site.js", 200, "text/javascript; charset=utf-8", "docsIndex"},
		"style":      {"GET", "/docs/assets/site.css", 200, "text/css; charset=utf-8", "color-scheme"},
		"index":      {"GET", "/docs/" + indexFile, 200, "text/javascript; charset=utf-8", "storeAfter"},
		"picture":    {"GET", "/docs/figures/path.svg", 200, "image/svg+xml", "prefers-color-scheme"},
		"unknown":    {"GET", "/docs/nothing.html", 404, "text/plain; charset=utf-8", "no such page"},
		"out of it":  {"GET", "/docs/../go.mod", 404, "text/plain; charset=utf-8", "no such page"},
		"escaped":    {"GET", "/docs/%2e%2e/%2e%2e/etc/passwd", 404, "text/plain; charset=utf-8", "no such page"},
		"source":     {"GET", "/docs/memory.md", 404, "text/plain; charset=utf-8", "no such page"},
		"change":     {"POST", "/docs/", 405, "text/plain; charset=utf-8", "not allowed"},
		"preflight":  {"OPTIONS", "/docs/", 405, "text/plain; charset=utf-8", "not allowed"},
	} {
		t.Run(name, func(t *testing.T) {
			got := ask(t, tt.method, srv.URL+tt.path)
			if got.status != tt.status || got.header.Get("Content-Type") != tt.kind || !strings.Contains(got.body, tt.body) {
				t.Errorf("status %d, type %q, body %.80q; want %d, %q, %q", got.status, got.header.Get("Content-Type"), got.body, tt.status, tt.kind, tt.body)
			}
			policy := csp
			if tt.kind == "image/svg+xml" {
				policy = pictureCSP
			}
			if tt.status == 200 && (got.header.Get("Content-Security-Policy") != policy || got.header.Get("X-Content-Type-Options") != "nosniff") {
				t.Errorf("headers %v lack protection", got.header)
			}
		})
	}
}

// TestCaching: a page that the client has is not sent again, and HEAD sends none.
func TestCaching(t *testing.T) {
	srv := httptest.NewServer(Handler())
	defer srv.Close()
	url := srv.URL + "/docs/memory.html"
	whole := ask(t, "GET", url, "Accept-Encoding", "identity")
	etag := whole.header.Get("ETag")
	if again := ask(t, "GET", url, "If-None-Match", etag); again.status != 304 || again.body != "" || etag == "" {
		t.Errorf("with the ETag %q: status %d and %d bytes", etag, again.status, len(again.body))
	}
	if head := ask(t, "HEAD", url, "Accept-Encoding", "identity"); head.status != 200 || head.body != "" || head.header.Get("Content-Length") != strconv.Itoa(len(whole.body)) {
		t.Errorf("HEAD: status %d, %d bytes, length %s of %d", head.status, len(head.body), head.header.Get("Content-Length"), len(whole.body))
	}
	if packed := ask(t, "GET", url, "Accept-Encoding", "gzip"); packed.header.Get("Content-Encoding") != "gzip" || len(packed.body) >= len(whole.body) {
		t.Errorf("gzip: encoding %q, %d of %d bytes", packed.header.Get("Content-Encoding"), len(packed.body), len(whole.body))
	}
}
