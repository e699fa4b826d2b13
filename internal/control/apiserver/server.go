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
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	etcdDir           = "etcd"
	readHeaderTimeout = 30 * time.Second
	drainTimeout      = 5 * time.Second
	// leaveBehindAfter is how long a server whose etcd stands still tries to stop in order.
	leaveBehindAfter = 2 * time.Second
)

// Server is an API server. Start or Run it once.
type Server struct {
	cfg   Config
	log   *slog.Logger
	local atomic.Pointer[drainer] // for in-process requests; nil while not running
	// stores are the kinds' by the type of their objects, for direct calls.
	stores atomic.Pointer[map[reflect.Type]*store]

	mu      sync.Mutex
	started bool       // +checklocks:mu
	undo    []func()   // +checklocks:mu
	engine  *machinery // +checklocks:mu
	words   *fatalHook // of the embedded etcd, nil without one; +checklocks:mu
	// of an existing etcd, nil without one
	outside *clientv3.Client // +checklocks:mu
	owner   *ownership       // +checklocks:mu

	failed chan error    // receives why a part ended unasked
	lost   chan struct{} // closed when the embedded etcd has given up
	addr   atomic.Value  // net.Addr
}

// New checks the configuration. It starts nothing and touches no file.
func New(cfg Config) (*Server, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Server{cfg: cfg, log: cfg.Log.With(telemetry.Component, "apiserver"), failed: make(chan error, 4), lost: make(chan struct{})}, nil
}

// RESTConfig returns a client configuration that calls the server directly as user, one of
// UserAdmin, UserController and UserNode. It may be asked for before the server is started;
// requests fail until then, and again after it stopped.
func (s *Server) RESTConfig(user string) *rest.Config {
	return &rest.Config{
		Host:      "http://in-process",
		Transport: &localTransport{server: s, user: userInfo(user)},
		QPS:       -1, // no limit of the client's own
		UserAgent: user,
	}
}

// AdminKubeconfig returns the path of the admin's kubeconfig, which Start writes if the server
// listens.
func (s *Server) AdminKubeconfig() string { return filepath.Join(s.cfg.DataDir, kubeconfigFile) }

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
	routeKlog(s.log)
	defer func() {
		if err != nil {
			s.unwindLocked()
		}
	}()
	begin := time.Now()
	if err := s.startLocked(ctx); err != nil {
		return fmt.Errorf("start API server: %w", errors.Join(err, s.lastWordsLocked()))
	}
	s.log.InfoContext(ctx, "API server ready", telemetry.Duration, time.Since(begin), telemetry.Address, s.cfg.Listen)
	return nil
}

// +checklocks:s.mu
func (s *Server) startLocked(ctx context.Context) error {
	if err := os.MkdirAll(s.cfg.DataDir, 0o700); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	unlock, err := lockDir(s.cfg.DataDir)
	if err != nil {
		return err
	}
	s.undo = append(s.undo, unlock)
	front, err := s.openFrontLocked(ctx)
	if err != nil {
		return err
	}
	b, err := s.openStorageLocked(ctx)
	if err != nil {
		return err
	}
	if s.engine, err = build(&s.cfg, b, front.token); err != nil {
		return err
	}
	s.undo = append(s.undo, s.engine.destroy)
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.undo = append(s.undo, cancel)
	s.engine.runHooks(run)
	inside := newDrainer(s.engine.inside)
	s.local.Store(inside)
	stores := s.engine.byType()
	s.stores.Store(&stores)
	s.undo = append(s.undo, func() {
		s.local.Store(nil)
		drain(run, inside)
	})
	if err := s.engine.awaitReady(ctx, s.RESTConfig(UserAdmin).Transport); err != nil {
		return err
	}
	if err := s.startControllersLocked(ctx, run, b); err != nil {
		return err
	}
	return s.serveLocked(run, front)
}

// lastWordsLocked is what the embedded etcd said when it gave up, if it did.
// +checklocks:s.mu
func (s *Server) lastWordsLocked() error {
	if s.words == nil || !s.words.over.Load() {
		return nil
	}
	select {
	case err := <-s.words.said:
		return fmt.Errorf("%w: %w", ErrStorage, err)
	default:
		return ErrStorage
	}
}

// openStorageLocked opens the embedded etcd, or takes a prefix of an existing one.
// +checklocks:s.mu
func (s *Server) openStorageLocked(ctx context.Context) (*backend, error) {
	if len(s.cfg.EtcdEndpoints) > 0 {
		if err := s.openOutsideLocked(ctx); err != nil {
			return nil, err
		}
		b, closeBackend := newBackend(&s.cfg, nil, nil) //nolint:contextcheck // what it starts ends with closeBackend
		s.undo = append(s.undo, closeBackend)
		return b, nil
	}
	e, words, err := startEtcd(ctx, filepath.Join(s.cfg.DataDir, etcdDir), s.cfg.QuotaBackendBytes, s.log)
	if err != nil {
		return nil, err
	}
	s.words = words
	s.undo = append(s.undo, func() { closeEtcd(e) })
	b, closeBackend := newBackend(&s.cfg, e, words) //nolint:contextcheck // what it starts ends with closeBackend
	s.undo = append(s.undo, closeBackend)
	return b, nil
}

// openOutsideLocked connects to an existing etcd and has it keep other servers away. It returns at
// once if etcd does not answer, where the storage layer would retry in silence.
// +checklocks:s.mu
func (s *Server) openOutsideLocked(ctx context.Context) error {
	lasting := context.WithoutCancel(ctx)
	ctx, cancel := context.WithTimeoutCause(ctx, etcdProbeTimeout, errNotReady)
	defer cancel()
	outside, err := dialEtcd(lasting, &s.cfg, s.log)
	if err != nil {
		return err
	}
	s.undo = append(s.undo, func() { _ = outside.Close() })
	owner, err := takeOwnership(ctx, outside, &s.cfg)
	if err != nil {
		return err
	}
	s.undo = append(s.undo, func() { owner.release(lasting) })
	s.outside, s.owner = outside, owner
	return nil
}

// startControllersLocked makes the namespaces that are always there, and starts what watches.
// +checklocks:s.mu
func (s *Server) startControllersLocked(ctx, run context.Context, b *backend) error {
	if err := s.engine.ensureNamespaces(ctx); err != nil {
		return err
	}
	work, cancel := context.WithCancel(run)
	var wg sync.WaitGroup
	s.undo = append(s.undo, func() {
		cancel()
		wg.Wait()
	})
	for name, f := range s.engine.controllers(s.log) {
		wg.Go(func() {
			if err := f(work); err != nil && work.Err() == nil {
				s.fail(fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	if b.etcd == nil {
		outside, owner := s.outside, s.owner
		wg.Go(func() { s.watchOutside(work, outside) })
		wg.Go(func() {
			if err := owner.keep(work, s.log); err != nil {
				s.fail(err)
			}
		})
		return nil
	}
	wg.Go(func() {
		err := b.awaitEnd(work)
		if errors.Is(err, ErrStorage) {
			close(s.lost)
		}
		if err != nil {
			s.fail(err)
		}
	})
	care := &maintenance{etcd: b.etcd, quota: s.cfg.QuotaBackendBytes, gate: s.cfg.Gate, log: s.log}
	wg.Go(func() { _ = care.run(work) }) // it ends with work alone
	return nil
}

// fail notes why a part ended; Run returns the first.
func (s *Server) fail(err error) {
	select {
	case s.failed <- err:
	default:
	}
}

// Run starts the server, unless that was done, and blocks until ctx is done or a part of it
// fails. It then stops it, and returns when nothing of it is left.
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

// StorageFailed returns a channel that is closed when the embedded etcd has given up over its
// files, which Run returns as an ErrStorage. Whatever waits for it then may wait for ever.
func (s *Server) StorageFailed() <-chan struct{} { return s.lost }

// Stop ends the server: first the listener and the requests, then the controllers, then
// storage. It returns when nothing is left, and may be called any number of times.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started = true
	s.unwindLocked()
}

// unwindLocked takes back what was started. What an etcd that stands still has locked can hold
// that up for ever, so the rest is then left behind after a while; the process is to end.
// +checklocks:s.mu
func (s *Server) unwindLocked() {
	undo := s.undo
	s.undo = nil
	all := func() {
		for _, f := range slices.Backward(undo) {
			f()
		}
	}
	if s.words == nil || !s.words.over.Load() {
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
	case <-time.After(leaveBehindAfter):
	}
}

// front is what others see of the server; all of it is empty without a listener.
type front struct {
	listener net.Listener
	certs    *localca.CA
	token    string
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
	s.undo = append(s.undo, func() { _ = f.listener.Close() })
	dir := filepath.Join(s.cfg.DataDir, pkiDir)
	if f.certs, err = localca.Open(localca.Config{Dir: dir, Names: certificateNames(&s.cfg)}); err != nil {
		return f, err
	}
	f.token, err = adminToken(s.cfg.AdminToken, dir)
	return f, err
}

// serveLocked answers over TLS.
// +checklocks:s.mu
func (s *Server) serveLocked(run context.Context, f front) error {
	if f.listener == nil {
		return nil
	}
	if err := writeKubeconfig(s.AdminKubeconfig(), f.listener.Addr(), f.certs.CertPEM(), f.token); err != nil {
		return err
	}
	remote := newDrainer(s.engine.remote)
	hs := &http.Server{
		Handler:           remote,
		ReadHeaderTimeout: readHeaderTimeout,
		ErrorLog:          slog.NewLogLogger(lowered{s.log.Handler()}, slog.LevelInfo),
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
		drain(run, remote)
		_ = hs.Close()
		wg.Wait()
	})
	return nil
}

// drain gives a handler's requests their time to end, whatever has become of ctx.
func drain(ctx context.Context, d *drainer) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer cancel()
	d.drain(ctx)
}
