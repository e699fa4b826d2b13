package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/edge/gateway/server"
)

// front is a listener that is bound before anything is ready, so that a port in use is reported at
// once, and whose handler is put in when the boot is over.
type front struct {
	listener net.Listener
	server   *server.Server
	handler  atomic.Pointer[http.Handler] // +checklocksignore
	early    http.Handler
	first    atomic.Pointer[func(http.ResponseWriter, *http.Request) bool] // see before; +checklocksignore
}

// bind takes an address. tlsConfig nil means plain HTTP, with HTTP/2 by prior knowledge too.
func (d *Daemon) bind(ctx context.Context, key, addr string, tlsConfig *tls.Config) (*front, error) {
	ln, err := listen(ctx, key, addr)
	if err != nil {
		return nil, err
	}
	f := &front{listener: ln, early: d.progress.Handler()}
	f.server = server.New(f, d.cfg.Log, d.cfg.ClientIdle, tlsConfig)
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

// ServeHTTP calls the hook of before, then the opened handler, else early.
func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if first := f.first.Load(); first != nil && (*first)(w, r) {
		return
	}
	if h := f.handler.Load(); h != nil {
		(*h).ServeHTTP(w, r)
		return
	}
	f.early.ServeHTTP(w, r)
}

// before sets a hook that runs first; it reports whether it has written the response.
func (f *front) before(first func(http.ResponseWriter, *http.Request) bool) { f.first.Store(&first) }

func (f *front) open(h http.Handler) { f.handler.Store(&h) }

// run serves until ctx is done; it then gives requests a moment to end and cuts the rest.
func (f *front) run(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- f.server.Serve(f.listener) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve %s: %w", f.listener.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	if err := f.server.Shutdown(grace); err != nil {
		_ = f.server.Close() // what is still open was given its time
	}
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", f.listener.Addr(), err)
	}
	return nil
}
