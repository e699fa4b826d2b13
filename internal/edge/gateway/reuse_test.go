package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestBodyAfterAClosedConnection sends a body while the transport has yet to notice that the service
// closed the connection it keeps: on a busy machine its reader runs late. Nothing was written, so the
// request is sent again with any method.
func TestBodyAfterAClosedConnection(t *testing.T) {
	var dials atomic.Int64
	late := &lateReaderDialer{loopDialer: loopDialer{dials: &dials}}
	w := newFixture(t, func(c *Config) { c.Dialer, c.ServiceIdle = late, eventually.Patience })
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(body)
	})
	b := w.box("a")
	for name, c := range map[string]*http.Client{"http1": w.client, "h2c": w.h2c} {
		for what, body := range map[string]func() io.Reader{
			"short":   func() io.Reader { return strings.NewReader("hello") },
			"chunked": func() io.Reader { return io.MultiReader(strings.NewReader("hello")) },
			"long":    func() io.Reader { return strings.NewReader(strings.Repeat("hello", 1<<17)) },
		} {
			t.Run(name+" "+what, func(t *testing.T) {
				for n := range 2 {
					want, err := io.ReadAll(body())
					if err != nil {
						t.Fatal(err)
					}
					res, text, err := w.try(c, http.MethodPost, b.url(port, "/"), body()) //nolint:bodyclose // try closes it
					if err != nil {
						t.Fatalf("request %d: %v", n, err)
					}
					if res.StatusCode != http.StatusOK || text != string(want) {
						t.Fatalf("request %d: got %d with %d bytes, want %d bytes", n, res.StatusCode, len(text), len(want))
					}
					w.idle()
					late.endAll()
				}
			})
		}
	}
}

// lateReaderDialer makes connections whose reader runs late: it returns an end of the connection only when
// the connection has been closed on this side.
type lateReaderDialer struct {
	loopDialer
	mu    sync.Mutex
	conns []*lateReaderConn
}

func (d *lateReaderDialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	nc, err := d.loopDialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := &lateReaderConn{TCPConn: nc.(*net.TCPConn), closed: make(chan struct{})}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conns = append(d.conns, c)
	return c, nil
}

// endAll ends the receiving side of all connections, as if their peers had closed them.
func (d *lateReaderDialer) endAll() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		_ = c.CloseRead() // fails if the connection is closed already
	}
	d.conns = nil
}

type lateReaderConn struct {
	*net.TCPConn
	closed chan struct{}
	once   sync.Once
}

func (c *lateReaderConn) Read(b []byte) (int, error) {
	n, err := c.TCPConn.Read(b)
	if err != nil {
		<-c.closed
	}
	return n, err
}

func (c *lateReaderConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.TCPConn.Close()
}

// TestKeptConnection: the first request to an agent uses an open connection to it, unless that is broken or leads elsewhere.
func TestKeptConnection(t *testing.T) {
	agent := backend(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.RemoteAddr) })
	for name, tt := range map[string]struct {
		change func(*keptConn)
		port   uint16
		dials  int64
	}{
		"open":            {func(*keptConn) {}, envd.Port, 0},
		"broken":          {func(c *keptConn) { _ = c.CloseWrite(); _, _ = c.Read(make([]byte, 1)) }, envd.Port, 1},
		"of another":      {func(c *keptConn) { c.remote = "10.0.0.1:49983" }, envd.Port, 1},
		"to another port": {func(*keptConn) {}, agent, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var asked []sandbox.ID
			var kept *keptConn
			w := newFixture(t, func(c *Config) {
				c.Dialer = agentAt{c.Dialer, agent}
				c.Kept = func(id sandbox.ID) net.Conn {
					if asked = append(asked, id); len(asked) > 1 {
						return nil
					}
					return kept
				}
			})
			b := w.box("a")
			nc, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", fmt.Sprint("127.0.0.1:", agent))
			if err != nil {
				t.Fatal(err)
			}
			kept = &keptConn{nc.(*net.TCPConn), net.JoinHostPort(b.Status.PodIPs[0], target.PortText(envd.Port))}
			t.Cleanup(func() { _ = kept.Close() })
			tt.change(kept)
			status, from := w.get(b.url(tt.port, "/"))
			if status != http.StatusOK {
				t.Fatalf("%d %s", status, from)
			}
			if usesKept := from == nc.LocalAddr().String(); usesKept != (tt.dials == 0) || w.dials.Load() != tt.dials {
				t.Errorf("a request from %s, kept %s, %d dials", from, nc.LocalAddr(), w.dials.Load())
			}
			if want := tt.port == envd.Port; (len(asked) == 1 && asked[0] == b.id) != want {
				t.Errorf("asked for %q", asked)
			}
		})
	}
}

// agentAt reaches agents at another port.
type agentAt struct {
	endpoint.Dialer
	port uint16
}

func (d agentAt) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if host, is := strings.CutSuffix(address, ":"+target.PortText(envd.Port)); is {
		address = net.JoinHostPort(host, target.PortText(d.port))
	}
	return d.Dialer.DialContext(ctx, network, address)
}

// keptConn is a connection to a stand-in for an agent.
type keptConn struct {
	*net.TCPConn
	remote string
}

func (c *keptConn) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.remote))
}
