package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
)

const (
	etcdStartTimeout = 30 * time.Second
	etcdProbeTimeout = 5 * time.Second
	// A single member has nobody to wait for before it elects itself.
	etcdTickMillis     = 10
	etcdElectionMillis = 50
	// etcdSnapshotCount is after how many writes the log in memory is cut.
	etcdSnapshotCount   = 5000
	etcdSnapshotCatchUp = 500
)

var errNotReady = errors.New("not ready in time")

// startEtcd runs a single-member etcd over dir in this process. It has no listener at all,
// neither for clients nor for peers: it is called directly. Every write is synced to disk
// before it is acknowledged.
func startEtcd(ctx context.Context, dir string, quota int64, log *slog.Logger) (*embed.Etcd, *fatalHook, error) {
	begun, err := beginEtcd(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("make etcd directory: %w", err)
	}
	words := newLastWords()
	ctx, cancel := context.WithTimeoutCause(ctx, etcdStartTimeout, errNotReady)
	defer cancel()
	e, err := openEtcd(ctx, etcdConfig(dir, quota, newZap(ctx, log, words)), words)
	if err != nil {
		return nil, nil, fmt.Errorf("open the data in %s: %w%s", dir, err, advice(err))
	}
	select {
	case <-e.Server.ReadyNotify():
		words.starting.Store(false)
		if err = begun(); err == nil {
			return e, words, nil
		}
	case err = <-e.Err():
	case err = <-words.said:
	case <-e.Server.StopNotify():
		err = errors.New("stopped by itself")
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	e.Close()
	return nil, nil, fmt.Errorf("start etcd in %s: %w", dir, err)
}

// advice is what to do about files that cannot be opened, if the disk is not what is wrong.
func advice(err error) string {
	for _, disk := range []error{unix.ENOSPC, unix.EROFS, unix.EDQUOT} {
		if errors.Is(err, disk) {
			return ""
		}
	}
	return " (restore it from a backup, or move it away to begin anew)"
}

// beginEtcd makes the directory. The first start of an etcd is all or nothing: one that ended
// between the first file and the first entry leaves files that will never elect a leader. So
// a note beside the directory says that there are no data yet, until the returned function is
// called; if it is found, the directory begins anew.
func beginEtcd(dir string) (begun func() error, err error) {
	note := dir + ".first-start"
	_, err = os.Stat(note)
	switch {
	case err == nil:
		if err := os.RemoveAll(dir); err != nil {
			return nil, err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	default:
		if _, err := os.Stat(filepath.Join(dir, "member")); err == nil {
			return func() error { return nil }, nil
		}
		if err := os.MkdirAll(filepath.Dir(note), 0o700); err != nil {
			return nil, err
		}
		if err := durable.WriteFile(note, nil, 0o600); err != nil {
			return nil, err
		}
	}
	return func() error { return durable.Remove(note) }, os.MkdirAll(dir, 0o700)
}

func etcdConfig(dir string, quota int64, log *zap.Logger) *embed.Config {
	cfg := embed.NewConfig()
	cfg.Name = "barchan"
	cfg.Dir = dir
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(log)
	cfg.QuotaBackendBytes = quota
	cfg.EnableGRPCGateway = false
	// The URLs are names only. They are recorded at the first start, so they say nothing of
	// the directory, which may be moved.
	name := url.URL{Scheme: "unix", Path: "/barchan-embedded"}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = nil, []url.URL{name}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = nil, []url.URL{name}
	cfg.InitialCluster = cfg.Name + "=" + name.String()
	cfg.TickMs, cfg.ElectionMs = etcdTickMillis, etcdElectionMillis
	cfg.SnapshotCount, cfg.SnapshotCatchUpEntries = etcdSnapshotCount, etcdSnapshotCatchUp
	return cfg
}

// openEtcd turns the ways in which etcd gives up over broken files into errors. The goroutine
// is left behind in one of them: if another of etcd's has given up, for which it waits.
func openEtcd(ctx context.Context, cfg *embed.Config, words *fatalHook) (*embed.Etcd, error) {
	type result struct {
		etcd *embed.Etcd
		err  error
	}
	opened := make(chan result, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				opened <- result{err: fmt.Errorf("etcd gave up: %v", p)}
			}
		}()
		e, err := embed.StartEtcd(cfg)
		opened <- result{e, err}
	}()
	select {
	case r := <-opened:
		return r.etcd, r.err
	case err := <-words.said:
		return nil, err
	case <-ctx.Done():
	}
	// etcd cannot be told to stop while it opens its files, which does not take long.
	select {
	case r := <-opened:
		if r.err == nil {
			r.etcd.Close()
		}
	case err := <-words.said:
		return nil, err
	}
	return nil, context.Cause(ctx)
}

// dialEtcd makes a client of an existing etcd.
func dialEtcd(ctx context.Context, cfg *Config, log *slog.Logger) (*clientv3.Client, error) {
	cc := clientv3.Config{Endpoints: cfg.EtcdEndpoints, Context: ctx, DialTimeout: etcdProbeTimeout, Logger: newZap(ctx, log, zapcore.WriteThenPanic)}
	if cfg.EtcdCAFile != "" || cfg.EtcdCertFile != "" {
		tlsInfo := transport.TLSInfo{TrustedCAFile: cfg.EtcdCAFile, CertFile: cfg.EtcdCertFile, KeyFile: cfg.EtcdKeyFile}
		t, err := tlsInfo.ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("read etcd's certificates: %w", err)
		}
		cc.TLS = t
	}
	c, err := clientv3.New(cc)
	if err != nil {
		return nil, fmt.Errorf("connect to etcd: %w", err)
	}
	return c, nil
}
