package etcd

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// A first start that ended before etcd's first entry leaves a log that never elects a leader.
func TestFirstStartInterrupted(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "etcd")
	open := func() {
		t.Helper()
		e, err := startEtcd(t.Context(), dir, 0, telemetry.Discard(), newFatalHook(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		e.Close()
	}
	if _, err := beginFirstStart(dir); err != nil {
		t.Fatal(err)
	}
	debris := filepath.Join(dir, "member", "wal", "0000000000000000-0000000000000000.wal")
	if err := os.MkdirAll(filepath.Dir(debris), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(debris, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	open()
	if _, err := os.Stat(dir + ".first-start"); err == nil {
		t.Error("the note of the first start is still there: the next one would lose all data")
	}
	mark := filepath.Join(dir, "member", "mark")
	if err := os.WriteFile(mark, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	open()
	if _, err := os.Stat(mark); err != nil {
		t.Errorf("a later start deleted the data: %v", err)
	}
}

// etcd panics over its closed database if a watch still reads previous values from it: that of
// watch.go:452. The watch here is behind by a batch of thousands when everything is closed.
func TestEtcdClosesAfterItsWatches(t *testing.T) {
	b := openBackend(t, t.TempDir())
	c := b.client()
	const (
		batch   = 1000 // revisions that etcd puts into one response
		writers = 10
	)
	var ops []clientv3.Op
	for i := range 100 {
		ops = append(ops, clientv3.OpPut(fmt.Sprintf("/key/%d", i), "value"))
	}
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range batch * 3 / 2 / writers {
				if _, err := c.Txn(t.Context()).Then(ops...).Commit(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	events := c.Watch(t.Context(), "/key/", clientv3.WithPrefix(), clientv3.WithPrevKV(), clientv3.WithRev(2))
	if first := <-events; first.Err() != nil {
		t.Fatal(first.Err())
	}
	_ = c.Close() // fails, as it was cancelled
	b.Close()
}

// openBackend starts etcd over a directory.
func openBackend(t *testing.T, dir string) *Backend {
	t.Helper()
	cfg := &Config{}
	if err := cfg.Complete(); err != nil {
		t.Fatal(err)
	}
	b, err := Open(t.Context(), cfg, dir, nil, telemetry.Discard())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestOldLogsAreRemoved: what a start reads does not grow with what was ever written.
func TestOldLogsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	b := openBackend(t, dir)
	c := b.client()
	const writers, files = 50, 5
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range 2*snapshotCount/writers + 1 { // the last snapshot is of the later half
				if _, err := c.Put(t.Context(), fmt.Sprintf("/%d", w), fmt.Sprint(i)+strings.Repeat("x", files*logBytes/(2*snapshotCount))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	logs := func() []string {
		names, err := filepath.Glob(filepath.Join(dir, "etcd", "member", "wal", "*.wal"))
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	if n := len(logs()); n < files {
		t.Fatalf("%d files of the log after %d MiB", n, files*logBytes>>20)
	}
	_ = c.Close()
	b.Close()
	b = openBackend(t, dir) // etcd looks for old files at each start, and every half minute
	eventually.True(t, "old files of the log are removed", func() bool { return len(logs()) <= files/2+1 })
	b.Close()
	b = openBackend(t, dir)
	defer b.Close()
	c = b.client()
	defer func() { _ = c.Close() }()
	if got, err := c.Get(t.Context(), "/0"); err != nil || len(got.Kvs) != 1 || got.Kvs[0].Version != 2*snapshotCount/writers+1 {
		t.Errorf("the key without old files of the log: %v, %v", got, err)
	}
}

// TestStartDefragments: a start gives back what compacted writes have left free in the file, and keeps the data.
func TestStartDefragments(t *testing.T) {
	dir := t.TempDir()
	b := openBackend(t, dir)
	c := b.client()
	var last int64
	for i := range 2 * startDefrag {
		put, err := c.Put(t.Context(), "/key", fmt.Sprint(i)+strings.Repeat("x", 1<<20))
		if err != nil {
			t.Fatal(err)
		}
		last = put.Header.Revision
	}
	if _, err := c.Compact(t.Context(), last, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	large := b.etcd.Server.Backend().Size()
	_ = c.Close()
	b.Close()
	b = openBackend(t, dir)
	defer b.Close()
	if small := b.etcd.Server.Backend().Size(); small > large-startDefrag<<20 {
		t.Errorf("%d bytes before, %d after", large, small)
	}
	c = b.client()
	defer func() { _ = c.Close() }()
	if got, err := c.Get(t.Context(), "/key"); err != nil || len(got.Kvs) != 1 || len(got.Kvs[0].Value) <= 1<<20 {
		t.Errorf("the key is lost: %v, %v", got, err)
	}
}

// A start applies the writes since the last snapshot again. If the log in memory were cut before they are all applied, an
// election at that moment would end etcd, as raft scans them.
func TestLogKeepsWhatAStartApplies(t *testing.T) {
	const atOnce = 3500 // writers
	cfg := etcdConfig(t.TempDir(), 1<<30, zap.NewNop())
	if cfg.SnapshotCatchUpEntries < cfg.SnapshotCount+atOnce {
		t.Errorf("snapshots after %d writes, and %d entries kept", cfg.SnapshotCount, cfg.SnapshotCatchUpEntries)
	}
}

// A fatal entry of one of etcd's goroutines while it starts is the error of the start, at once, although etcd can no longer be
// stopped: raft's goroutine has ended, for which it would wait.
func TestFatalEntryWhileStarting(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "etcd")
	fatal := newFatalHook(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := startEtcd(t.Context(), dir, 1<<30, slog.New(tripwire{slog.DiscardHandler, fatal}), fatal)
		failed <- err
	}()
	select {
	case err := <-failed:
		if err == nil || !strings.Contains(err.Error(), "tripwire") {
			t.Errorf("start: %v", err)
		}
	case <-time.After(eventually.Patience):
		t.Fatal("the start hangs")
	}
}

// tripwire is a log whose first entry of an election is fatal.
type tripwire struct {
	slog.Handler
	fatal *fatalHook
}

func (w tripwire) Enabled(context.Context, slog.Level) bool { return true }
func (w tripwire) WithAttrs([]slog.Attr) slog.Handler       { return w }
func (w tripwire) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "became candidate") {
		w.fatal.OnWrite(&zapcore.CheckedEntry{Entry: zapcore.Entry{Message: "tripwire"}}, nil)
	}
	return nil
}
