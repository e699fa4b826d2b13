package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/errs"
)

const (
	headerTimeout = 30 * time.Second
	// idleTimeout is beyond that of the proxies in front of us, so that they close first.
	idleTimeout = 620 * time.Second
	maxHeader   = 64 << 10
)

// front is a listener that is bound before anything is ready, so that a port in use is told at
// once, and whose handler is put in when the boot is over.
type front struct {
	listener net.Listener
	server   *http.Server
	handler  atomic.Pointer[http.Handler] // +checklocksignore
	early    http.Handler
}

// bind takes an address. tlsConfig nil means plain HTTP, with HTTP/2 by prior knowledge too.
func bind(ctx context.Context, log *slog.Logger, key, addr string, tlsConfig *tls.Config, early http.Handler) (*front, error) {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("%s: %s is in use by another program; stop it, or choose another address: %w", key, addr, errs.ErrConflict)
		}
		return nil, fmt.Errorf("%s: listen on %s: %w", key, addr, err)
	}
	f := &front{listener: ln, early: early}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	if tlsConfig != nil {
		protocols.SetHTTP2(true)
		f.listener = tls.NewListener(ln, tlsConfig)
	} else {
		protocols.SetUnencryptedHTTP2(true)
	}
	f.server = &http.Server{
		Handler: f, Protocols: &protocols, TLSConfig: tlsConfig, MaxHeaderBytes: maxHeader,
		ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout,
		HTTP2:    &http.HTTP2Config{MaxConcurrentStreams: 1000},
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	return f, nil
}

// ServeHTTP passes to what has been put in, else to early.
func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if h := f.handler.Load(); h != nil {
		(*h).ServeHTTP(w, r)
		return
	}
	f.early.ServeHTTP(w, r)
}

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

// earlyHandler answers while the server boots.
func earlyHandler(p *phases) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", healthz)
	mux.Handle("GET /readyz", p)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		_, current, _ := p.snapshot()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintf(w, `{"code":503,"message":"the server is starting (%s)"}`+"\n", current)
	})
	return mux
}

func healthz(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain")
	fmt.Fprintln(w, "ok")
}
