package etcd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/control/apiserver/liblog"
)

const (
	startTimeout = 30 * time.Second
	probeTimeout = 5 * time.Second
	// A single member elects itself, so it need not wait long.
	tickMillis     = 10
	electionMillis = 50
	// After snapshotCount writes etcd notes on disk that they are applied; a start applies all later ones again. It
	// elects itself meanwhile, and panics if the log in memory was cut before an entry that raft has yet to count as
	// applied. So the log keeps snapshotCatchUp entries, more than there can be of those: a snapshot comes after all writes that
	// are applied together, one of each writer.
	snapshotCount   = 500
	snapshotCatchUp = 8 * snapshotCount
	// A start reads all files of the log twice, also those that it does not apply. So etcd keeps maxLogs of them, by default five, and
	// those that it needs. It begins a new file after logBytes, by default 64 MB: snapshotCount writes of sandboxes are less. With one
	// log to keep it would report every half minute that it still needs another.
	maxLogs  = 2
	logBytes = 4 << 20
	// startDefrag is how many MiB a start frees at least if it defragments etcd's file. All of the file counts as resident
	// memory, as etcd maps it as a whole.
	startDefrag = 16
)

// setLogSize sets a variable of etcd, for all that this process starts.
var setLogSize = sync.OnceFunc(func() { wal.SegmentSizeBytes = logBytes })

var errNotReady = errors.New("not ready in time")

// startEtcd runs a single-member etcd over dir in this process, without listeners for clients or
// peers. Every write is synced to disk before it is acknowledged. fatal is a new hook of its own.
func startEtcd(ctx context.Context, dir string, quota int64, log *slog.Logger, fatal *fatalHook) (*embed.Etcd, error) {
	setLogSize()
	begun, err := beginFirstStart(dir)
	if err != nil {
		return nil, fmt.Errorf("make etcd directory: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, errNotReady)
	defer cancel()
	e, err := openEtcd(ctx, etcdConfig(dir, quota, liblog.NewZap(ctx, log, fatal)), fatal)
	if err != nil {
		return nil, fmt.Errorf("open the data in %s: %w%s", dir, err, advice(err))
	}
	select {
	case <-e.Server.ReadyNotify():
		fatal.starting.Store(false)
		if err = begun(); err == nil {
			return e, nil
		}
	case err = <-e.Err():
	case <-fatal.running.Done():
	case <-e.Server.StopNotify():
		err = errors.New("stopped unexpectedly")
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if fatal.running.Err() != nil { // Close would wait for the goroutine that the fatal entry has ended
		go e.Close()
		err = fatal.cause()
	} else {
		e.Close()
	}
	return nil, fmt.Errorf("start etcd in %s: %w", dir, err)
}

// advice returns the remedy for files that cannot be opened, unless the disk is the cause.
func advice(err error) string {
	for _, disk := range []error{unix.ENOSPC, unix.EROFS, unix.EDQUOT} {
		if errors.Is(err, disk) {
			return ""
		}
	}
	return " (restore it from a backup, or move it away to start empty)"
}

// beginFirstStart makes the directory. A first start that ended between etcd's first file and first
// entry leaves files that never elect a leader. So a note beside the directory marks it as
// empty until the returned function is called; a directory with a note is deleted first.
func beginFirstStart(dir string) (begun func() error, err error) {
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
	// The URLs are names only. The first start records them, so they do not contain the
	// directory, which may be moved.
	name := url.URL{Scheme: "unix", Path: "/barchan-embedded"}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = nil, []url.URL{name}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = nil, []url.URL{name}
	cfg.InitialCluster = cfg.Name + "=" + name.String()
	cfg.TickMs, cfg.ElectionMs = tickMillis, electionMillis
	cfg.SnapshotCount, cfg.SnapshotCatchUpEntries = snapshotCount, snapshotCatchUp
	cfg.MaxWalFiles = maxLogs
	if mayDefrag(dir) {
		cfg.BootstrapDefragThresholdMegabytes = startDefrag
	}
	return cfg
}

// mayDefrag reports whether the disk has room for a second file of etcd's: without it, the start would fail.
func mayDefrag(dir string) bool {
	file, err := os.Stat(filepath.Join(dir, "member", "snap", "db"))
	if err != nil {
		return false
	}
	free, err := durable.Free(dir)
	return err == nil && free >= file.Size()+defragSlack
}

// openEtcd turns etcd's panics and fatal log entries over broken files into errors. Its goroutine
// remains if it waits for another of etcd's that a fatal entry has ended.
func openEtcd(ctx context.Context, cfg *embed.Config, fatal *fatalHook) (*embed.Etcd, error) {
	type result struct {
		etcd *embed.Etcd
		err  error
	}
	opened := make(chan result, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				opened <- result{err: fmt.Errorf("etcd panicked: %v", p)}
			}
		}()
		e, err := embed.StartEtcd(cfg)
		opened <- result{e, err}
	}()
	select {
	case r := <-opened:
		return r.etcd, r.err
	case <-fatal.running.Done():
		return nil, fatal.cause()
	case <-ctx.Done():
	}
	// etcd cannot be stopped while it opens its files, which does not take long.
	select {
	case r := <-opened:
		if r.err == nil {
			r.etcd.Close()
		}
	case <-fatal.running.Done():
		return nil, fatal.cause()
	}
	return nil, context.Cause(ctx)
}

// dialEtcd returns a client of an existing etcd.
func dialEtcd(ctx context.Context, cfg *Config, log *slog.Logger) (*clientv3.Client, error) {
	cc := clientv3.Config{Endpoints: cfg.Endpoints, Context: ctx, DialTimeout: probeTimeout, Logger: liblog.NewZap(ctx, log, zapcore.WriteThenPanic)}
	if cfg.CAFile != "" || cfg.CertFile != "" {
		tlsInfo := transport.TLSInfo{TrustedCAFile: cfg.CAFile, CertFile: cfg.CertFile, KeyFile: cfg.KeyFile}
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
