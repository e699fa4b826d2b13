package apiserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver/etcd"
	"github.com/barchan-dev/barchan/internal/control/apiserver/liblog"
)

const (
	lockFile          = "apiserver.lock"
	readHeaderTimeout = 30 * time.Second
	// idleTimeout and maxHead bound what strangers can keep: connections, and heads of requests that are begun.
	idleTimeout  = 3 * time.Minute
	maxHead      = 64 << 10
	drainTimeout = 5 * time.Second
	// stuckStopTimeout limits an orderly stop while the embedded etcd is stuck.
	stuckStopTimeout = 2 * time.Second
)

// Server is an API server. Start or Run it once.
type Server struct {
	cfg   Config
	log   *slog.Logger
	local atomic.Pointer[local] // nil while not running

	mu      sync.Mutex
	started bool          // +checklocks:mu
	undo    []func()      // +checklocks:mu
	engine  *engine       // +checklocks:mu
	backend *etcd.Backend // nil until it is open; +checklocks:mu

	failed chan error    // receives the errors of parts that ended
	lost   chan struct{} // closed on an etcd.ErrStorage
	addr   atomic.Value  // net.Addr
}

// New checks the configuration. It starts nothing and touches no file.
func New(cfg Config) (*Server, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	cfg.Etcd.Share = shareParts()
	return &Server{cfg: cfg, log: cfg.Log.With(telemetry.Component, "apiserver"), failed: make(chan error, 4), lost: make(chan struct{})}, nil
}

// RESTConfig returns a client configuration that calls the server directly as user, one of
// UserAdmin, UserController and UserNode. Requests fail until the server has started, and
// again after it has stopped.
func (s *Server) RESTConfig(user string) *rest.Config {
	return &rest.Config{
		Host:      "http://in-process",
		Transport: &localTransport{server: s, user: userInfo(user)},
		QPS:       -1, // no limit in the client
		UserAgent: user,
	}
}

// AdminKubeconfig returns the path of the admin's kubeconfig, which Start writes if the server
// listens.
func (s *Server) AdminKubeconfig() string {
	return filepath.Join(s.cfg.DataDir, adminCredentials.kubeconfig)
}

// NodeKubeconfig returns the path of the node's kubeconfig, which Start writes if the server listens and
// the configuration asks for it.
func (s *Server) NodeKubeconfig() string {
	return filepath.Join(s.cfg.DataDir, nodeCredentials.kubeconfig)
}

// Addr returns where the server listens; nil before Start, or without a listener.
func (s *Server) Addr() net.Addr {
	a, _ := s.addr.Load().(net.Addr)
	return a
}

// Start opens storage and returns when the server answers requests. The server then runs until
// [Server.Stop], or until the context of [Server.Run] is done; ctx bounds the start alone. If
// it fails, nothing is left running.
func (s *Server) Start(ctx context.Context) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started {
		return fmt.Errorf("start API server: %w: it was started before", errs.ErrConflict)
	}
	s.started = true
	liblog.RouteKlog(s.log)
	begin := time.Now()
	if err := s.startLocked(ctx); err != nil {
		if s.backend != nil {
			err = errors.Join(err, s.backend.Err())
		}
		s.unwindLocked()
		return fmt.Errorf("start API server: %w", err)
	}
	s.log.InfoContext(ctx, "API server ready", telemetry.Duration, time.Since(begin), telemetry.Address, s.cfg.Listen)
	return nil
}

// +checklocks:s.mu
func (s *Server) startLocked(ctx context.Context) error {
	if err := s.lockDirLocked(); err != nil {
		return err
	}
	front, err := s.openFrontLocked(ctx)
	if err != nil {
		return err
	}
	if s.backend, err = etcd.Open(ctx, &s.cfg.Etcd, s.cfg.DataDir, s.cfg.Gate, s.log); err != nil {
		return err
	}
	s.undo = append(s.undo, s.backend.Close)
	if s.engine, err = build(&s.cfg, s.backend.Options, front.tokens); err != nil {
		return err
	}
	s.undo = append(s.undo, s.engine.destroy)
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.undo = append(s.undo, cancel)
	s.engine.server.RunPostStartHooks(run)
	inside := newDrainer(run, s.engine.inside)
	s.local.Store(&local{inside, s.engine.byType(), s.engine.registry})
	s.undo = append(s.undo, func() {
		s.local.Store(nil)
		inside.drain()
	})
	if err := s.engine.awaitReady(ctx, s.RESTConfig(UserAdmin).Transport); err != nil {
		return err
	}
	if err := s.engine.registry.EnsureNamespaces(ctx); err != nil {
		return err
	}
	s.startControllersLocked(run)
	return s.serveLocked(run, front)
}

// +checklocks:s.mu
func (s *Server) lockDirLocked() error {
	dir := s.cfg.DataDir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	release, holder, err := durable.Lock(filepath.Join(dir, lockFile))
	if errors.Is(err, errs.ErrConflict) {
		return fmt.Errorf("data directory %s: %w: in use by another server (process %s)", dir, errs.ErrConflict, holder)
	}
	if err != nil {
		return fmt.Errorf("data directory %s: %w", dir, err)
	}
	s.undo = append(s.undo, func() { _ = release() })
	return nil
}

// startControllersLocked starts the controllers and the care of the storage.
// +checklocks:s.mu
func (s *Server) startControllersLocked(run context.Context) {
	work, cancel := context.WithCancel(run)
	var wg sync.WaitGroup
	s.undo = append(s.undo, func() {
		cancel()
		wg.Wait()
	})
	controllers := s.engine.controllers(s.log)
	controllers["storage"], controllers["storage maintenance"] = s.backend.Await, s.backend.Maintain
	for name, f := range controllers {
		wg.Go(func() {
			err := f(work)
			if err == nil || work.Err() != nil {
				return
			}
			if errors.Is(err, etcd.ErrStorage) {
				close(s.lost)
			}
			s.fail(fmt.Errorf("%s: %w", name, err))
		})
	}
}

// fail records why a part ended; Run returns the first error.
func (s *Server) fail(err error) {
	select {
	case s.failed <- err:
	default:
	}
}

// RotateSecretsKey replaces the key that encrypts Secrets, and returns how many were written again; see [etcd.Backend.RotateKey].
func (s *Server) RotateSecretsKey(ctx context.Context) (int, error) {
	s.mu.Lock()
	b := s.backend
	s.mu.Unlock()
	if b == nil {
		return 0, errs.Public(errs.ErrUnavailable, "the API server does not run")
	}
	return b.RotateKey(ctx)
}

// Run starts the server, unless it was started, and blocks until ctx is done or a part of it
// fails. It then stops the server and returns when all of it has ended.
func (s *Server) Run(ctx context.Context) error {
	s.mu.Lock()
	started := s.started
	s.mu.Unlock()
	if !started {
		if err := s.Start(ctx); err != nil {
			return err
		}
	}
	defer s.Stop()
	select {
	case <-ctx.Done():
		return nil
	case err := <-s.failed:
		return fmt.Errorf("API server: %w", err)
	}
}

// StorageFailed returns a channel that is closed when the embedded etcd has stopped because of its
// files; Run then returns an etcd.ErrStorage.
func (s *Server) StorageFailed() <-chan struct{} { return s.lost }

// Stop ends the server: first the listener and the requests, then the controllers, then
// storage. It returns when all have ended, and may be called any number of times.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started = true
	s.unwindLocked()
}

// unwindLocked reverses the start. Locks of a stuck etcd can block it permanently; it then returns
// after a while, since the process is about to end.
// +checklocks:s.mu
func (s *Server) unwindLocked() {
	undo := s.undo
	s.undo = nil
	all := func() {
		for _, f := range slices.Backward(undo) {
			f()
		}
	}
	if s.backend == nil || s.backend.Err() == nil {
		all()
		return
	}
	done := make(chan struct{})
	go func() { // may never end: see above
		defer close(done)
		all()
	}()
	select {
	case <-done:
	case <-time.After(stuckStopTimeout):
	}
}

// front is the network side of the server; it is empty without a listener.
type front struct {
	listener net.Listener
	certs    *localca.CA
	tokens   map[string]string // of users, by their names
}

// openFrontLocked takes the port, so that one in use is an error before anything else happens.
// +checklocks:s.mu
func (s *Server) openFrontLocked(ctx context.Context) (f front, err error) {
	if s.cfg.Listen == "" {
		return f, nil
	}
	var lc net.ListenConfig
	if f.listener, err = lc.Listen(ctx, "tcp", s.cfg.Listen); err != nil {
		return f, fmt.Errorf("listen: %w", err)
	}
	if s.cfg.Limit != nil {
		f.listener = s.cfg.Limit(f.listener)
	}
	s.undo = append(s.undo, func() { _ = f.listener.Close() })
	dir := filepath.Join(s.cfg.DataDir, pkiDir)
	if f.certs, err = localca.Open(localca.Config{Dir: dir, Names: certificateNames(s.cfg.Listen)}); err != nil {
		return f, err
	}
	f.tokens = map[string]string{}
	for _, c := range s.credentials() {
		if f.tokens[c.user], err = loadToken(filepath.Join(dir, c.tokenFile)); err != nil {
			return f, fmt.Errorf("credentials of %s: %w", c.user, err)
		}
	}
	return f, nil
}

// serveLocked answers over TLS.
// +checklocks:s.mu
func (s *Server) serveLocked(run context.Context, f front) error {
	if f.listener == nil {
		return nil
	}
	for _, c := range s.credentials() {
		if err := writeKubeconfig(filepath.Join(s.cfg.DataDir, c.kubeconfig), f.listener.Addr(), f.certs.CertPEM(), f.tokens[c.user]); err != nil {
			return err
		}
	}
	remote := newDrainer(run, s.engine.remote)
	hs := &http.Server{
		Handler:           remote,
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHead,
		HTTP2:             &http.HTTP2Config{MaxReceiveBufferPerConnection: 256 << 10, MaxReceiveBufferPerStream: 64 << 10},
		ErrorLog:          slog.NewLogLogger(liblog.Lower(s.log), slog.LevelInfo),
		BaseContext:       func(net.Listener) context.Context { return run },
		TLSConfig:         f.certs.TLSConfig(),
	}
	s.addr.Store(f.listener.Addr())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := hs.ServeTLS(f.listener, "", ""); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			s.fail(fmt.Errorf("serve: %w", err))
		}
	})
	s.undo = append(s.undo, func() {
		_ = f.listener.Close()
		remote.drain()
		_ = hs.Close()
		wg.Wait()
	})
	return nil
}
