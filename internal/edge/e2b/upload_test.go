package e2b

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace/noop"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/edge/e2b/templates"
	"github.com/barchan-dev/barchan/internal/edge/gateway/server"
)

// put uploads by a URL without a key.
func (f *fixture) put(url string, body io.Reader) (int, string) {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodPut, url, body)
	if err != nil {
		f.t.Fatal(err)
	}
	res, err := f.Client().Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return res.StatusCode, string(text)
}

func TestUpload(t *testing.T) {
	f, files := newBuildFixture(t, builds.Config{MaxFiles: 50_000})
	var got api.GetTemplateFiles201JSONResponse
	f.want(201, &got, "GET", "/templates/any/files/"+buildHash, "")
	url := request.Deref(got.URL)
	if got.Present || !strings.HasPrefix(url, f.URL+templates.UploadPath+team+"/"+buildHash+"/") {
		t.Fatalf("files are %+v", got)
	}
	large := strings.Repeat("x", 50_000) // more than the most of other bodies
	for name, give := range map[string]struct {
		url    string
		body   io.Reader
		status int
		text   string
	}{
		"no length": {url, io.MultiReader(strings.NewReader("x")), 411, "Content-Length"},
		"empty":     {url, http.NoBody, 400, "empty"},
		"too large": {url, strings.NewReader(large + "x"), 413, "larger than 50000 bytes"},
		"signature": {url + "x", strings.NewReader("x"), 403, "not valid or has expired"},
		"hash":      {strings.Replace(url, "/ab", "/bb", 1), strings.NewReader("x"), 403, "not valid or has expired"},
		"namespace": {strings.Replace(url, "/"+team, "/"+otherTeam, 1), strings.NewReader("x"), 403, "not valid or has expired"},
		"expired":   {f.URL + templates.UploadPath + signedurl.Upload(f.manager.Builds.UploadKey, team, buildHash, time.Now()), strings.NewReader("x"), 403, "expired"},
		"no path":   {f.URL + templates.UploadPath, strings.NewReader("x"), 403, "not valid"},
	} {
		if status, text := f.put(give.url, give.body); status != give.status || !strings.Contains(text, give.text) {
			t.Errorf("%s: %d %s, want %d and %s", name, status, text, give.status, give.text)
		}
	}
	if files.HasFiles(team, buildHash) {
		t.Error("a refused upload is kept")
	}
	if status, text := f.put(url, strings.NewReader(large)); status != 204 || text != "" {
		t.Errorf("upload: %d %s", status, text)
	}
	f.want(201, &got, "GET", "/templates/any/files/"+buildHash, "")
	if !got.Present {
		t.Error("what was uploaded is not present")
	}
	f.want(201, &got, "GET", "/templates/any/files/"+buildHash, "", "X-API-Key", f.other)
	if got.Present {
		t.Error("another team sees the files")
	}
	f.want(404, nil, "GET", strings.TrimPrefix(url, f.URL), "")
	f.want(404, nil, "POST", strings.TrimPrefix(url, f.URL), "")
	if status, _ := newFixture(t).put(strings.Replace(url, f.URL, newFixture(t).URL, 1), strings.NewReader("x")); status != 501 {
		t.Errorf("without builds: %d", status)
	}
}

// TestUploadThatStops ends in the middle: nothing of it is kept.
func TestUploadThatStops(t *testing.T) {
	f, files := newBuildFixture(t, builds.Config{})
	var got api.GetTemplateFiles201JSONResponse
	f.want(201, &got, "GET", "/templates/any/files/"+buildHash, "")
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(f.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf", strings.TrimPrefix(request.Deref(got.URL), f.URL)); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(conn)
	if err = errors.Join(err, conn.Close()); err != nil || !bytes.Contains(text, []byte("HTTP/1.1 400")) || !bytes.Contains(text, []byte("the body ended early")) {
		t.Errorf("answer is %s, %v", text, err)
	}
	if files.HasFiles(team, buildHash) {
		t.Error("half an upload is kept")
	}
}

// TestUploadOverProtocols uploads through the server of the gateway, as large as needs many reads.
func TestUploadOverProtocols(t *testing.T) {
	f, files := newBuildFixture(t, builds.Config{})
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := server.New(f.Config.Handler, telemetry.Discard(), time.Minute, nil)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() { _ = s.Close(); wg.Wait() })
	for digit, set := range map[string]func(*http.Protocols, bool){"1": (*http.Protocols).SetHTTP1, "2": (*http.Protocols).SetUnencryptedHTTP2} {
		hash, protocols := strings.Repeat(digit, 64), &http.Protocols{}
		set(protocols, true)
		transport := &http.Transport{Protocols: protocols}
		t.Cleanup(transport.CloseIdleConnections)
		url := "http://" + l.Addr().String() + templates.UploadPath + signedurl.Upload(f.manager.Builds.UploadKey, team, hash, time.Now().Add(time.Minute))
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, url, bytes.NewReader(make([]byte, 5<<20)))
		if err != nil {
			t.Fatal(err)
		}
		res, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatalf("HTTP/%s: %v", digit, err)
		}
		_ = res.Body.Close()
		if res.StatusCode != 204 || fmt.Sprint(res.ProtoMajor) != digit || !files.HasFiles(team, hash) {
			t.Errorf("HTTP/%s: %s by %s", digit, res.Status, res.Proto)
		}
	}
}

// TestSlowUpload: the deadline of a body holds behind what wraps the handler.
func TestSlowUpload(t *testing.T) {
	answer := make(chan error, 1)
	s := httptest.NewServer(telemetry.TraceHandler(noop.NewTracerProvider(), "api", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		out := &telemetry.StatusRecorder{ResponseWriter: w}
		_, err := io.ReadAll(request.PacedBody(out, r, 50*time.Millisecond))
		answer <- err
	})))
	defer s.Close()
	half, end := io.Pipe()
	go func() { _, _ = end.Write([]byte("half")) }()
	defer func() { _ = end.Close() }()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, s.URL, half)
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = 1000
	if res, err := s.Client().Do(req); err == nil {
		_ = res.Body.Close()
	}
	if err := <-answer; !errors.Is(err, os.ErrDeadlineExceeded) || !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("the body ends with %v", err)
	}
}

// TestOrigin: the URL of an upload is by the host and the scheme of the request.
func TestOrigin(t *testing.T) {
	for _, give := range []struct {
		host, want string
		tls        bool
		header     []string
	}{
		{host: "127.0.0.1:7700", want: "http://127.0.0.1:7700"},
		{host: "api.example.com:7743", tls: true, want: "https://api.example.com:7743"},
		{host: "inner:80", header: []string{"X-Forwarded-Proto", "https", "X-Forwarded-Host", "api.example.com, other"}, want: "https://api.example.com"},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
		r.Host = give.host
		if give.tls {
			r.TLS = &tls.ConnectionState{}
		}
		for i := 0; i < len(give.header); i += 2 {
			r.Header.Set(give.header[i], give.header[i+1])
		}
		if got := request.Origin(r); got != give.want {
			t.Errorf("by %s: %s, want %s", give.host, got, give.want)
		}
	}
}
