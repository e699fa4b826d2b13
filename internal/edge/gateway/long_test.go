package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// long is for how long WebSockets echo.
var long = flag.Duration("gateway.long", 2*time.Second, "for how long to keep WebSockets busy")

// TestGiBBothWays carries a GiB up and down at once, a short run 64 MiB, and compares hashes.
func TestGiBBothWays(t *testing.T) {
	size := int64(1 << 30)
	if testing.Short() {
		size = 64 << 20
	}
	w := newFixture(t)
	up := make(chan [sha256.Size]byte, 1)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		var wg sync.WaitGroup
		wg.Go(func() { up <- sum(r.Body) })
		_, _ = io.CopyN(w, endless(1), size)
		wg.Wait()
	})
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, w.box("a").url(port, "/"), io.LimitReader(endless(2), size))
	req.ContentLength = size
	res, err := w.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	for which, pair := range map[byte][2][sha256.Size]byte{1: {sum(res.Body)}, 2: {<-up}} {
		if want := sum(io.LimitReader(endless(which), size)); pair[0] != want {
			t.Errorf("hash %x of way %d, want %x", pair[0], which, want)
		}
	}
}

// endless is bytes without end, the same for the same seed. It costs less than random ones.
func endless(seed byte) io.Reader {
	block := make([]byte, 1<<20+7)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(block)
	return &cycle{block: block}
}

type cycle struct {
	block []byte
	at    int
}

func (c *cycle) Read(p []byte) (int, error) {
	n := copy(p, c.block[c.at:])
	c.at = (c.at + n) % len(c.block)
	return n, nil
}

// sum is the hash of all that can be read.
func sum(r io.Reader) (out [sha256.Size]byte) {
	h := sha256.New()
	_, _ = io.Copy(h, r)
	copy(out[:], h.Sum(nil))
	return out
}

// TestSingleBytesBothWays streams in both directions at once, byte by byte, neither waiting for
// the other.
func TestSingleBytesBothWays(t *testing.T) {
	w := newFixture(t)
	const count = 2000
	counted := make(chan int, 1)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.EnableFullDuplex()
		var wg sync.WaitGroup
		wg.Go(func() {
			n, _ := io.Copy(io.Discard, r.Body)
			counted <- int(n)
		})
		for i := range count {
			_, _ = w.Write([]byte{byte(i)})
			_ = rc.Flush()
		}
		wg.Wait()
	})
	b := w.box("a")
	for name, c := range w.clients(t) {
		t.Run(name, func(t *testing.T) {
			pr, pw := io.Pipe()
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() {
				for i := range count {
					_, _ = pw.Write([]byte{byte(i)})
				}
				_ = pw.Close()
			})
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, b.url(port, "/"), pr)
			res, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = res.Body.Close() }()
			got, err := io.ReadAll(res.Body)
			if err != nil || len(got) != count {
				t.Fatalf("%d bytes down, %v", len(got), err)
			}
			for i := range got {
				if got[i] != byte(i) {
					t.Fatalf("byte %d is %d", i, got[i])
				}
			}
			if n := <-counted; n != count {
				t.Errorf("%d bytes up", n)
			}
		})
	}
}

// TestWebSocketsForLong keeps WebSockets of several sandboxes busy; no one reads another's message.
func TestWebSocketsForLong(t *testing.T) {
	w := newFixture(t)
	port := backend(t, echoWebSocket)
	over := time.After(*long)
	done := make(chan struct{})
	var echoes atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		<-over
		close(done)
	})
	for i := range 8 {
		b := w.box(fmt.Sprint("ws", i))
		wg.Go(func() {
			c, _, err := websocket.Dial(t.Context(), b.url(port, "/ws"), &websocket.DialOptions{HTTPClient: w.client}) //nolint:bodyclose // the library does
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = c.CloseNow() }()
			c.SetReadLimit(1 << 20)
			for n := 0; ; n++ {
				message := bytes.Repeat(fmt.Appendf(nil, "%d/%d ", i, n), 1+n%500)
				if err := c.Write(t.Context(), websocket.MessageBinary, message); err != nil {
					t.Errorf("socket %d, message %d: %v", i, n, err)
					return
				}
				if _, got, err := c.Read(t.Context()); err != nil || !bytes.Equal(got, message) {
					t.Errorf("socket %d, message %d: %d bytes, %v", i, n, len(got), err)
					return
				}
				echoes.Add(1)
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	wg.Wait()
	if echoes.Load() == 0 {
		t.Error("no echo at all")
	}
	w.idle()
}

// TestManyStreams has 200 streams on one HTTP/2 connection, all open at once, each with a
// conversation of its own; then each is a stream as gRPC has them.
func TestManyStreams(t *testing.T) {
	const streams, rounds = 200, 5
	w := newFixture(t)
	port := backend(t, echoLines)
	clients := w.clients(t)
	for _, name := range []string{"h2c", "tls_h2"} {
		// A client makes a connection for each host of a URL, and for each request that comes before
		// the first is there: so all have one URL, and differ by Host.
		w.do(clients[name], http.MethodGet, "http://"+testDomain, nil) //nolint:bodyclose // do closes it
		for _, contentType := range []string{"text/plain", "application/grpc"} {
			t.Run(name+"/"+contentType, func(t *testing.T) {
				var open, wg sync.WaitGroup
				open.Add(streams)
				for i := range streams {
					b := w.box(fmt.Sprintf("%s-%s-%d", name, contentType, i))
					wg.Go(func() {
						var once sync.Once
						defer once.Do(open.Done)
						if err := converse(t.Context(), clients[name], b.host(port), contentType, i, rounds, func() {
							once.Do(open.Done)
							open.Wait() // until all are
						}); err != nil {
							t.Errorf("stream %d: %v", i, err)
						}
					})
				}
				wg.Wait()
			})
		}
	}
	w.idle()
}

// echoLines answers each line of a request with the same line, at once.
func echoLines(w http.ResponseWriter, r *http.Request) {
	rc := http.NewResponseController(w)
	_ = rc.EnableFullDuplex()
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	w.Header().Set("Trailer", "Grpc-Status")
	_ = rc.Flush()
	in := bufio.NewReader(r.Body)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			break
		}
		_, _ = io.WriteString(w, line)
		_ = rc.Flush()
	}
	w.Header().Set("Grpc-Status", "0")
}

// converse exchanges messages on one stream. begun runs when the answer has begun.
func converse(ctx context.Context, c *http.Client, host, contentType string, id, rounds int, begun func()) error {
	pr, pw := io.Pipe()
	defer func() { _ = pw.Close() }()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+testDomain, pr)
	if err != nil {
		return err
	}
	req.Host = host
	req.Header.Set("Content-Type", contentType)
	res, err := c.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	begun()
	in := bufio.NewReader(res.Body)
	for round := range rounds {
		want := fmt.Sprintf("%d sends %d\n", id, round)
		if _, err := io.WriteString(pw, want); err != nil {
			return err
		}
		if got, err := in.ReadString('\n'); err != nil || got != want {
			return fmt.Errorf("round %d: %q, %w", round, got, err)
		}
	}
	_ = pw.Close()
	if rest, err := io.ReadAll(in); err != nil || len(rest) > 0 || res.Trailer.Get("Grpc-Status") != "0" {
		return fmt.Errorf("the end: %q, trailers %v, %w", rest, res.Trailer, err)
	}
	return nil
}

// TestStoppedReaderStopsTheWriter: a client or service that does not read stops the other side,
// in requests, responses and tunnels, and the gateway keeps little of what is under way.
func TestStoppedReaderStopsTheWriter(t *testing.T) {
	w := newFixture(t)
	var written, read atomic.Int64
	release := make(chan struct{})
	port := raw(t, func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReaderSize(c, 16))
		if err != nil {
			return
		}
		switch r.URL.Path {
		case "/down":
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
			flood(c, &written)
		case "/tunnel-down":
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
			flood(c, &written)
		case "/tunnel-up":
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
			<-release
		default:
			<-release
		}
		n, _ := io.Copy(io.Discard, c)
		read.Add(n)
	})
	defer close(release)
	host := strings.TrimPrefix(w.box("a").url(port, ""), "http://")
	for _, path := range []string{"/down", "/up", "/tunnel-down", "/tunnel-up"} {
		t.Run(path[1:], func(t *testing.T) {
			written.Store(0)
			const conns = 10
			before := heap()
			var wg sync.WaitGroup
			var open []net.Conn
			for range conns {
				c := w.connect(t)
				open = append(open, c)
				head := "POST " + path + " HTTP/1.1\r\nHost: " + host + "\r\n"
				switch {
				case strings.HasPrefix(path, "/tunnel"):
					head += "Connection: Upgrade\r\nUpgrade: x\r\n\r\n"
				case path == "/up":
					head += "Content-Length: 10000000000\r\n\r\n"
				default:
					head += "Content-Length: 0\r\n\r\n"
				}
				if _, err := io.WriteString(c, head); err != nil {
					t.Fatal(err)
				}
				if strings.HasSuffix(path, "up") {
					wg.Go(func() { flood(c, &written) })
				}
			}
			settled(t, &written)
			if n := written.Load(); n == 0 || n > conns*32<<20 {
				t.Errorf("%d bytes went into %d connections without a reader", n, conns)
			}
			if grown := heap() - before; grown > conns*1<<20 {
				t.Errorf("the gateway keeps %d bytes for %d connections", grown, conns)
			}
			for _, c := range open {
				_ = c.(*net.TCPConn).SetLinger(0)
				_ = c.Close()
			}
			wg.Wait()
		})
	}
}

// flood writes until it cannot.
func flood(c net.Conn, count *atomic.Int64) {
	block := make([]byte, 64<<10)
	for range (4 << 30) / len(block) {
		n, err := c.Write(block)
		count.Add(int64(n))
		if err != nil {
			return
		}
	}
}

// settled waits until a count has begun and has been the same for a while: no event shows that a
// writer is stuck.
func settled(t *testing.T, count *atomic.Int64) {
	t.Helper()
	last, same := int64(-1), 0
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(eventually.Patience); same < 15; {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("still going after %d bytes", count.Load())
		}
		if n := count.Load(); n == last && n > 0 {
			same++
		} else {
			last, same = n, 0
		}
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse) + int64(m.StackInuse)
}

// TestKilledUnderAnUpload kills the sandbox while the client sends: the response is an error, and the
// client's connection closes.
func TestKilledUnderAnUpload(t *testing.T) {
	w := newFixture(t)
	begun := make(chan struct{}, 1)
	port := raw(t, func(c net.Conn) {
		if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			begun <- struct{}{}
			_, _ = io.Copy(io.Discard, c)
		}
	})
	for name, c := range w.clients(t) {
		t.Run(name, func(t *testing.T) {
			b := w.box("up" + name)
			pr, pw := io.Pipe()
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() {
				block := make([]byte, 32<<10)
				for {
					if _, err := pw.Write(block); err != nil {
						return
					}
				}
			})
			defer func() { _ = pr.CloseWithError(errors.New("over")) }()
			wg.Go(func() {
				<-begun
				b.kill()
			})
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, b.url(port, "/"), pr)
			res, err := c.Do(req)
			if err != nil {
				return // the connection was closed under the upload: honest as well
			}
			defer func() { _ = res.Body.Close() }()
			if res.StatusCode != http.StatusBadGateway {
				t.Errorf("got %d", res.StatusCode)
			}
		})
	}
	w.idle()
}
