package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coder/websocket"

	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// secure serves the gateway over TLS and returns the authority's certificate and the address.
func (w *fixture) secure(t *testing.T) (*x509.CertPool, string) {
	t.Helper()
	ca, err := localca.Open(localca.Config{Dir: t.TempDir(), Domains: []string{testDomain}})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.CertPEM())
	return roots, serve(t, w.gateway.Server(ca.TLSConfig()))
}

// clients are the ways to speak to a gateway, by name. TLS goes through a listener of its own.
func (w *fixture) clients(t *testing.T) map[string]*http.Client {
	t.Helper()
	roots, addr := w.secure(t)
	secure := func(protocols func(*http.Protocols)) *http.Client {
		c := clientTo(t, addr, protocols)
		c.Transport.(*http.Transport).TLSClientConfig = &tls.Config{RootCAs: roots}
		c.Transport = https{c.Transport}
		return c
	}
	return map[string]*http.Client{
		"http1":     w.client,
		"h2c":       w.h2c,
		"tls_http1": secure(func(p *http.Protocols) { p.SetHTTP1(true) }),
		"tls_h2":    secure(func(p *http.Protocols) { p.SetHTTP2(true) }),
	}
}

// https sends requests by TLS for any URL.
type https struct{ http.RoundTripper }

func (h https) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Scheme = "https"
	return h.RoundTripper.RoundTrip(r)
}

func TestProtocolOfEachClient(t *testing.T) {
	w := newFixture(t)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", r.Proto, r.Header.Get("X-Forwarded-Proto"))
	})
	b := w.box("a")
	for name, c := range w.clients(t) {
		res, text := w.do(c, http.MethodGet, b.url(port, "/"), nil) //nolint:bodyclose // do closes it
		wantProto, wantScheme := "HTTP/1.1", "http"
		if strings.HasSuffix(name, "h2") || name == "h2c" {
			wantProto = "HTTP/2.0"
		}
		if strings.HasPrefix(name, "tls") {
			wantScheme = "https"
		}
		if res.Proto != wantProto || text != "HTTP/1.1 "+wantScheme {
			t.Errorf("%s: client spoke %s, sandbox saw %q", name, res.Proto, text)
		}
	}
}

// TestFullDuplex sends a byte and waits for its echo, many times, within one request.
func TestFullDuplex(t *testing.T) {
	w := newFixture(t)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		if err := rc.EnableFullDuplex(); err != nil {
			t.Errorf("full duplex: %v", err)
		}
		w.WriteHeader(http.StatusOK)
		_ = rc.Flush()
		var b [1]byte
		for {
			if _, err := io.ReadFull(r.Body, b[:]); err != nil {
				return
			}
			_, _ = w.Write(b[:])
			_ = rc.Flush()
		}
	})
	b := w.box("a")
	for name, c := range w.clients(t) {
		t.Run(name, func(t *testing.T) {
			pr, pw := io.Pipe()
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, b.url(port, "/"), pr)
			res, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = res.Body.Close() }()
			for i := range 300 {
				want := byte(i)
				if _, err := pw.Write([]byte{want}); err != nil {
					t.Fatal(err)
				}
				var got [1]byte
				if _, err := io.ReadFull(res.Body, got[:]); err != nil || got[0] != want {
					t.Fatalf("echo %d = %d, %v", i, got[0], err)
				}
			}
			_ = pw.Close()
			if rest, err := io.ReadAll(res.Body); err != nil || len(rest) > 0 {
				t.Errorf("after the end: %q, %v", rest, err)
			}
		})
	}
}

// TestEventsArriveAtOnce has the service send each event only when the client saw the last.
func TestEventsArriveAtOnce(t *testing.T) {
	w := newFixture(t)
	seen := make(chan struct{})
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		if r.URL.Path == "/sized" {
			w.Header().Set("Content-Length", "90")
		}
		rc := http.NewResponseController(w)
		_ = rc.Flush()
		for i := range 10 {
			select {
			case <-seen:
			case <-r.Context().Done():
				return
			}
			fmt.Fprintf(w, "data: %d\n\n", i)
			_ = rc.Flush()
		}
	})
	b := w.box("a")
	for name, c := range w.clients(t) {
		for _, path := range []string{"/", "/sized"} {
			t.Run(name+path, func(t *testing.T) {
				req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url(port, path), nil)
				res, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = res.Body.Close() }()
				lines := bufio.NewScanner(res.Body)
				for i := range 10 {
					seen <- struct{}{}
					if !lines.Scan() || lines.Text() != fmt.Sprintf("data: %d", i) || !lines.Scan() {
						t.Fatalf("event %d: %q, %v", i, lines.Text(), lines.Err())
					}
				}
			})
		}
	}
}

func TestBigBodiesBothWays(t *testing.T) {
	w := newFixture(t)
	const size = 64 << 20
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			h := sha256.New()
			_, _ = io.Copy(h, r.Body)
			fmt.Fprint(w, hex.EncodeToString(h.Sum(nil)))
			return
		}
		if r.URL.Path == "/sized" {
			w.Header().Set("Content-Length", fmt.Sprint(size))
		}
		_, _ = io.CopyN(w, rand.NewChaCha8([32]byte{1}), size)
	})
	h := sha256.New()
	_, _ = io.CopyN(h, rand.NewChaCha8([32]byte{1}), size)
	want := hex.EncodeToString(h.Sum(nil))
	b := w.box("a")
	for name, c := range w.clients(t) {
		t.Run(name, func(t *testing.T) {
			for _, path := range []string{"/sized", "/chunked"} {
				req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url(port, path), nil)
				res, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				got := sha256.New()
				n, err := io.Copy(got, res.Body)
				_ = res.Body.Close()
				if err != nil || n != size || hex.EncodeToString(got.Sum(nil)) != want {
					t.Errorf("GET %s: %d bytes, %v", path, n, err)
				}
			}
			for _, sized := range []bool{true, false} {
				req, _ := http.NewRequestWithContext(t.Context(), http.MethodPut, b.url(port, "/"), io.LimitReader(rand.NewChaCha8([32]byte{1}), size))
				if sized {
					req.ContentLength = size
				}
				res, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				text, _ := io.ReadAll(res.Body)
				_ = res.Body.Close()
				if string(text) != want {
					t.Errorf("PUT sized=%v: hash %q, want %q", sized, text, want)
				}
			}
		})
	}
}

// TestBackPressure checks that a client that does not read stops the service.
func TestBackPressure(t *testing.T) {
	w := newFixture(t)
	var sent atomic.Int64
	port := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		block := make([]byte, 64<<10)
		for range (1 << 30) / len(block) {
			n, err := w.Write(block)
			sent.Add(int64(n))
			if err != nil {
				return
			}
		}
	})
	b := w.box("a")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, b.url(port, "/"), nil)
	res, err := w.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	settled(t, &sent)
	if n := sent.Load(); n > 64<<20 {
		t.Errorf("the service sent %d bytes to a client that read none", n)
	}
}

func TestClientAbortReachesTheService(t *testing.T) {
	w := newFixture(t)
	aborted := make(chan struct{}, 1)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		} else {
			_ = http.NewResponseController(w).EnableFullDuplex()
			_ = http.NewResponseController(w).Flush()
			_, _ = io.Copy(io.Discard, r.Body)
		}
		aborted <- struct{}{}
	})
	b := w.box("a")
	for name, c := range w.clients(t) {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			t.Run(name+"_"+method, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				pr, pw := io.Pipe()
				defer func() { _ = pw.Close() }()
				var body io.Reader
				if method == http.MethodPost {
					body = pr
				}
				req, _ := http.NewRequestWithContext(ctx, method, b.url(port, "/"), body)
				res, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				cancel()
				_ = res.Body.Close() // or else an HTTP/2 client waits for its own body first
				<-aborted
			})
		}
	}
}

func TestWebSocket(t *testing.T) {
	w := newFixture(t)
	port := backend(t, echoWebSocket)
	b := w.box("a")
	for name, c := range w.clients(t) {
		if c == w.h2c || name == "tls_h2" {
			continue // WebSockets ride on HTTP/1.1
		}
		t.Run(name, func(t *testing.T) {
			conn, _, err := websocket.Dial(t.Context(), b.url(port, "/ws"), &websocket.DialOptions{HTTPClient: c}) //nolint:bodyclose // the library does
			if err != nil {
				t.Fatal(err)
			}
			conn.SetReadLimit(1 << 20)
			for _, size := range []int{0, 1, 125, 126, 70_000, 300_000} {
				message := bytes.Repeat([]byte("x"), size)
				if err := conn.Write(t.Context(), websocket.MessageBinary, message); err != nil {
					t.Fatal(err)
				}
				if _, got, err := conn.Read(t.Context()); err != nil || !bytes.Equal(got, message) {
					t.Fatalf("echo of %d: %d bytes, %v", size, len(got), err)
				}
			}
			if err := conn.Close(websocket.StatusNormalClosure, "done"); err != nil {
				t.Errorf("close: %v", err)
			}
		})
	}
	w.idle()
}

func echoWebSocket(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return
	}
	c.SetReadLimit(1 << 20)
	defer func() { _ = c.CloseNow() }()
	for {
		kind, message, err := c.Read(r.Context())
		if err != nil {
			return
		}
		if err := c.Write(r.Context(), kind, message); err != nil {
			return
		}
	}
}

// idle waits until the gateway carries nothing.
func (w *fixture) idle() {
	w.t.Helper()
	eventually.True(w.t, "the gateway is idle", func() bool {
		n, _ := w.gateway.requests.Count()
		return n == 0
	})
}

func TestTrailersAndGRPC(t *testing.T) {
	w := newFixture(t)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Announced")
		w.Header().Set("X-Proto", r.Proto+" "+r.Header.Get("Te"))
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(body)
		_ = http.NewResponseController(w).Flush()
		w.Header().Set("Announced", "yes "+r.Trailer.Get("From-Client"))
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	})
	b := w.box("a")
	for name, c := range w.clients(t) {
		for _, contentType := range []string{"text/plain", "application/grpc+proto"} {
			t.Run(name+"/"+contentType, func(t *testing.T) {
				req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, b.url(port, "/"), io.MultiReader(strings.NewReader("body")))
				req.Trailer = http.Header{"From-Client": {"hi"}}
				req.Header.Set("Content-Type", contentType)
				req.Header.Set("Te", "trailers")
				res, err := c.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = res.Body.Close() }()
				text, err := io.ReadAll(res.Body)
				if err != nil || string(text) != "body" {
					t.Fatalf("body %q, %v", text, err)
				}
				if res.Trailer.Get("Announced") != "yes hi" || res.Trailer.Get("Grpc-Status") != "0" {
					t.Errorf("trailers %v", res.Trailer)
				}
				want := "HTTP/1.1 trailers"
				if res.ProtoMajor == 2 && strings.HasPrefix(contentType, "application/grpc") {
					want = "HTTP/2.0 trailers"
				}
				if got := res.Header.Get("X-Proto"); got != want {
					t.Errorf("sandbox saw %q, want %q", got, want)
				}
			})
		}
	}
}

// TestEarlyAnswer answers an upload before it is over. The client must get the answer.
func TestEarlyAnswer(t *testing.T) {
	w := newFixture(t)
	port := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex() // else the service waits for the upload
		http.Error(w, "too much", http.StatusRequestEntityTooLarge)
	})
	b := w.box("a")
	for name, c := range w.clients(t) {
		t.Run(name, func(t *testing.T) {
			pr, pw := io.Pipe()
			defer func() { _ = pw.Close() }()
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, b.url(port, "/"), pr)
			res, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(res.Body)
			_ = res.Body.Close()
			if err != nil && !errors.Is(err, io.EOF) || res.StatusCode != http.StatusRequestEntityTooLarge || string(text) != "too much\n" {
				t.Errorf("got %d %q, %v", res.StatusCode, text, err)
			}
		})
	}
	w.idle()
}
