// Package front has the listeners of a server. They are bound before anything is ready, so that a port in use is reported at once, and serve
// when they are opened.
package front

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/edge/gateway/connlimit"
	"github.com/barchan-dev/barchan/internal/edge/gateway/server"
)

// HTTP is a listener of HTTP. Until it is opened, it answers with the handler that it was made with.
type HTTP struct {
	listener net.Listener
	server   *server.Server
	drain    time.Duration
	handler  atomic.Pointer[http.Handler] // +checklocksignore
	early    http.Handler
	first    atomic.Pointer[func(http.ResponseWriter, *http.Request) bool] // see Before; +checklocksignore
}

// Config is what listeners of HTTP have in common.
type Config struct {
	// Early answers until a listener is opened.
	Early http.Handler
	Log   *slog.Logger
	// ClientConnections bounds the connections of one client address, and its requests over HTTP/2, and ClientIdle the time of one without a request.
	ClientConnections int
	ClientIdle        time.Duration
	// Drain is how long requests may continue when the listener stops.
	Drain time.Duration
}

// Bind takes an address; key is its setting. tlsConfig nil means plain HTTP, with HTTP/2 by prior knowledge too.
func (c Config) Bind(ctx context.Context, key, addr string, tlsConfig *tls.Config) (*HTTP, error) {
	ln, err := listen(ctx, key, addr)
	if err != nil {
		return nil, err
	}
	f := &HTTP{listener: connlimit.New(ln, c.ClientConnections), drain: c.Drain, early: c.Early}
	f.server = server.New(connlimit.Requests(f, c.ClientConnections), c.Log, c.ClientIdle, tlsConfig)
	return f, nil
}

// listen takes an address; key is its setting.
func listen(ctx context.Context, key, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s: %s is in use by another program; stop it, or choose another address: %w", key, addr, errs.ErrConflict)
	case err != nil:
		return nil, fmt.Errorf("%s: listen on %s: %w", key, addr, err)
	}
	return ln, nil
}

// Addr is the address that was taken.
func (f *HTTP) Addr() netip.AddrPort { return addrOf(f.listener) }

// Close gives up a listener that is not run.
func (f *HTTP) Close() error { return f.listener.Close() }

// ServeHTTP calls the hook of Before, then the opened handler, else early.
func (f *HTTP) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if first := f.first.Load(); first != nil && (*first)(w, r) {
		return
	}
	if h := f.handler.Load(); h != nil {
		(*h).ServeHTTP(w, r)
		return
	}
	f.early.ServeHTTP(w, r)
}

// Before sets a hook that runs first; it reports whether it has written the response.
func (f *HTTP) Before(first func(http.ResponseWriter, *http.Request) bool) { f.first.Store(&first) }

// Open puts the real handler in.
func (f *HTTP) Open(h http.Handler) { f.handler.Store(&h) }

// Run serves until ctx is done; it then gives requests a moment to end and cuts the rest.
func (f *HTTP) Run(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- f.server.Serve(f.listener) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve %s: %w", f.listener.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.drain)
	defer cancel()
	if err := f.server.Shutdown(grace); err != nil {
		_ = f.server.Close() // what is still open was given its time
	}
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", f.listener.Addr(), err)
	}
	return nil
}
