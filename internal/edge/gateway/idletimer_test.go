package gateway

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// pipes is a network of one listener in memory, for tests whose time is not the machine's.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), closed: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func (*pipes) Addr() net.Addr { return &net.TCPAddr{} }

func (p *pipes) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-p.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// run serves until the test ends.
func (p *pipes) run(t *testing.T, s testServer) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(p)
	}()
	t.Cleanup(func() {
		_ = s.Close()
		<-done
	})
}

// TestStreamThatMoves: a stream with data before each timeout continues.
func TestStreamThatMoves(t *testing.T) {
	for name, change := range map[string]func(*http.Protocols){
		"http1": func(p *http.Protocols) { p.SetHTTP1(true) }, "h2c": func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) },
	} {
		for _, contentType := range []string{"text/plain", "application/grpc"} {
			t.Run(name+"/"+contentType, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { streamThatMoves(t, change, contentType) })
			})
		}
	}
}

func streamThatMoves(t *testing.T, change func(*http.Protocols), contentType string) {
	const limit = time.Minute
	service, front := newPipes(), newPipes()
	both := &http.Protocols{}
	both.SetHTTP1(true)
	both.SetUnencryptedHTTP2(true)
	service.run(t, &http.Server{Protocols: both, ReadHeaderTimeout: limit, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for range 10 {
			_, _ = io.WriteString(w, ".")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-time.After(limit - time.Nanosecond):
			case <-r.Context().Done():
				return
			}
		}
	})})
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	w := &fixture{t: t, table: route.NewTable(), tokens: tokens}
	w.table.MarkSynced()
	if w.gateway, err = New(Config{
		Domains: []string{testDomain}, Routes: w.table, Tokens: tokens, Log: telemetry.Discard(), Dialer: service, StreamIdle: limit,
	}); err != nil {
		t.Fatal(err)
	}
	front.run(t, w.gateway.Server(nil))
	t.Cleanup(func() {
		if err := w.gateway.Drain(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	protocols := &http.Protocols{}
	change(protocols)
	tr := &http.Transport{Protocols: protocols, DialContext: front.DialContext}
	t.Cleanup(tr.CloseIdleConnections)
	res, text := w.do(&http.Client{Transport: tr}, http.MethodGet, w.box("a").url(80, "/"), nil, "Content-Type", contentType) //nolint:bodyclose // do closes it
	if res.StatusCode != http.StatusOK || text != ".........." {
		t.Errorf("got %d %q", res.StatusCode, text)
	}
}
