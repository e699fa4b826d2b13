package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"
)

// paths are the ways to the same service: direct, by a bare ReverseProxy of the standard
// library, and by the gateway.
func paths(b *testing.B, h http.HandlerFunc) map[string]func() (*http.Client, string) {
	b.Helper()
	w := newFixture(b)
	port := backend(b, h)
	direct := fmt.Sprintf("127.0.0.1:%d", port)
	target := &url.URL{Scheme: "http", Host: direct}
	bare := &httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true},
	}
	b.Cleanup(bare.Transport.(*http.Transport).CloseIdleConnections)
	proxy := serve(b, &http.Server{Handler: bare, ReadHeaderTimeout: time.Minute})
	box := w.box("bench")
	http1 := func(p *http.Protocols) { p.SetHTTP1(true) }
	at := func(addr string) func() (*http.Client, string) {
		return func() (*http.Client, string) { return clientTo(b, addr, http1), "http://" + addr + "/" }
	}
	return map[string]func() (*http.Client, string){
		"1_direct":       at(direct),
		"2_reverseproxy": at(proxy),
		"3_gateway":      func() (*http.Client, string) { return clientTo(b, w.addr, http1), box.url(port, "/") },
	}
}

func each(b *testing.B, all map[string]func() (*http.Client, string), run func(*testing.B, *http.Client, string)) {
	for _, name := range []string{"1_direct", "2_reverseproxy", "3_gateway"} {
		b.Run(name, func(b *testing.B) {
			client, url := all[name]()
			run(b, client, url)
		})
	}
}

func fetch(ctx context.Context, c *http.Client, url string) (int64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	res, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = res.Body.Close() }()
	return io.Copy(io.Discard, res.Body)
}

// BenchmarkSmallRequest is one request after another on one connection.
func BenchmarkSmallRequest(b *testing.B) {
	each(b, paths(b, hello), func(b *testing.B, c *http.Client, url string) {
		took := make([]time.Duration, 0, 1<<16)
		for b.Loop() {
			start := time.Now()
			if _, err := fetch(b.Context(), c, url); err != nil {
				b.Fatal(err)
			}
			took = append(took, time.Since(start))
		}
		report(b, took)
	})
}

// Benchmark50Connections keeps 50 connections busy. The client is raw, so that it costs little
// of the machine that it shares with what it measures.
func Benchmark50Connections(b *testing.B) {
	each(b, paths(b, hello), func(b *testing.B, c *http.Client, target string) {
		u, _ := url.Parse(target)
		var mu sync.Mutex
		var took []time.Duration
		work := make(chan struct{}, 64)
		var wg sync.WaitGroup
		for range 50 {
			conn, err := c.Transport.(*http.Transport).DialContext(b.Context(), "tcp", u.Host)
			if err != nil {
				b.Fatal(err)
			}
			wg.Go(func() {
				mine := pound(conn, u.Host, work)
				mu.Lock()
				took = append(took, mine...)
				mu.Unlock()
			})
		}
		start := time.Now()
		for b.Loop() {
			work <- struct{}{}
		}
		close(work)
		wg.Wait()
		b.ReportMetric(float64(len(took))/time.Since(start).Seconds(), "req/s")
		report(b, took)
	})
}

// pound sends a small request for each piece of work, and returns how long each took.
func pound(conn net.Conn, host string, work <-chan struct{}) []time.Duration {
	defer func() { _ = conn.Close() }()
	request := []byte("GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n")
	buf := make([]byte, 4096)
	var took []time.Duration
	for range work {
		start := time.Now()
		if _, err := conn.Write(request); err != nil {
			return took
		}
		n := 0
		for n < 5 || string(buf[n-5:n]) != "hello" {
			m, err := conn.Read(buf[n:])
			if n += m; err != nil {
				return took
			}
		}
		took = append(took, time.Since(start))
	}
	return took
}

func report(b *testing.B, took []time.Duration) {
	b.Helper()
	slices.Sort(took)
	if n := len(took); n > 0 {
		b.ReportMetric(float64(took[n/2].Microseconds()), "p50-µs")
		b.ReportMetric(float64(took[n*99/100].Microseconds()), "p99-µs")
	}
}

// BenchmarkDownload1GiB reads a GiB with a known length.
func BenchmarkDownload1GiB(b *testing.B) {
	const size = 1 << 30
	block := make([]byte, 1<<20)
	all := paths(b, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(size))
		for range size / len(block) {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	})
	each(b, all, func(b *testing.B, c *http.Client, url string) {
		b.SetBytes(size)
		for b.Loop() {
			if n, err := fetch(b.Context(), c, url); err != nil || n != size {
				b.Fatalf("%d bytes, %v", n, err)
			}
		}
	})
}
