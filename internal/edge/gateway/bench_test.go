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

	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
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

// BenchmarkDial opens connections to the real agent and to a service, in turns bare and proved. It reports the time of each,
// and how many times that of the bare dial the proved one takes.
func BenchmarkDial(b *testing.B) {
	dialer := &atAddress{}
	w := newFixture(b, func(c *Config) { c.Dialer = dialer })
	box := w.box("bench")
	dialer.set(startAgent(b, box.id, w.tokens.Agent(box.id)), loopback(backend(b, hello)))
	entry, ok := w.table.Lookup(box.id)
	if !ok {
		b.Fatal("no route")
	}
	proved := w.gateway.endpoints
	proved.Verifier = identity.NewVerifier(w.tokens)
	ends := []*endpoint.Endpoint{endpoint.New(&w.gateway.endpoints, entry, nil), endpoint.New(&proved, entry, nil)}
	b.Cleanup(ends[0].Close)
	b.Cleanup(ends[1].Close)
	for name, port := range map[string]uint16{"agent": envd.Port, "service": anyPort} {
		b.Run(name, func(b *testing.B) {
			var took [2][]time.Duration
			for b.Loop() {
				for i, e := range ends {
					start := time.Now()
					c, err := e.Open(b.Context(), port)
					if err != nil {
						b.Fatal(err)
					}
					took[i] = append(took[i], time.Since(start))
					_ = c.Close()
				}
			}
			for i := range took {
				slices.Sort(took[i])
			}
			bare, proved := took[0][len(took[0])/2], took[1][len(took[1])/2]
			b.ReportMetric(float64(bare.Nanoseconds())/1000, "bare-p50-µs")
			b.ReportMetric(float64(proved.Nanoseconds())/1000, "proved-p50-µs")
			b.ReportMetric(float64(proved)/float64(bare), "proved/bare")
		})
	}
}
