package auditlog_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// write runs a log while add adds to it, until all is written.
func write(t *testing.T, cfg auditlog.Config, add func(*auditlog.Log)) {
	t.Helper()
	cfg.Log = telemetry.Discard()
	l, err := auditlog.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	add(l)
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string, f auditlog.Filter) (got []string) {
	t.Helper()
	err := auditlog.Read(t.Context(), path, f, false, func(e auditlog.Entry) error {
		got = append(got, e.Name)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log", "audit.log")
	write(t, auditlog.Config{Path: path, MaxSize: 1000, MaxFiles: 3}, func(l *auditlog.Log) {
		for i := range 100 {
			l.Add(auditlog.Entry{By: auditlog.ByKey, Name: fmt.Sprintf("n%02d", i), Action: "create sandboxes", Status: 201})
		}
	})
	files, _ := filepath.Glob(path + "*")
	if len(files) != 3 {
		t.Fatalf("files are %v, want 3", files)
	}
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil || info.Size() > 1000 || info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v and %d bytes, %v", f, info.Mode(), info.Size(), err)
		}
	}
	got := read(t, path, auditlog.Filter{})
	if len(got) < 12 || !slices.IsSorted(got) || got[len(got)-1] != "n99" {
		t.Errorf("read %v", got)
	}
}

func TestFilterAndResult(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	now := time.Now()
	write(t, auditlog.Config{Path: path}, func(l *auditlog.Log) {
		l.Add(auditlog.Entry{Name: "old", Sandbox: "a", Time: now.Add(-time.Hour)})
		l.Add(auditlog.Entry{Name: "made", Made: []string{"x", "a"}, Status: 500})
		l.Add(auditlog.Entry{Name: "other", Sandbox: "b", Status: 403})
	})
	if got := read(t, path, auditlog.Filter{Sandbox: "a"}); !slices.Equal(got, []string{"old", "made"}) {
		t.Errorf("of the sandbox: %v", got)
	}
	if got := read(t, path, auditlog.Filter{Since: now.Add(-time.Minute)}); !slices.Equal(got, []string{"made", "other"}) {
		t.Errorf("since a minute ago: %v", got)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		var e auditlog.Entry
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.Result != []string{"ok", "failed", "refused"}[i] {
			t.Errorf("line %d is %s, %v", i, line, err)
		}
	}
}

// TestCrashedLine has a line that a crash left unfinished end before the next one.
func TestCrashedLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte(`{"name":"half`), 0o600); err != nil {
		t.Fatal(err)
	}
	write(t, auditlog.Config{Path: path}, func(l *auditlog.Log) { l.Add(auditlog.Entry{Name: "next"}) })
	if got := read(t, path, auditlog.Filter{}); !slices.Equal(got, []string{"next"}) {
		t.Errorf("read %v", got)
	}
}

// TestFullDisk loses entries, counts them, and never blocks Add. /dev/full refuses every write.
func TestFullDisk(t *testing.T) {
	metrics := prometheus.NewPedanticRegistry()
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.Symlink("/dev/full", path); err != nil {
		t.Fatal(err)
	}
	write(t, auditlog.Config{Path: path, Metrics: metrics}, func(l *auditlog.Log) {
		for range 10_000 {
			l.Add(auditlog.Entry{Name: "lost"})
		}
	})
	if err := testutil.GatherAndCompare(metrics, strings.NewReader("# HELP barchan_audit_lost_total Entries that are missing in the audit log because its disk was full, too slow or failed.\n# TYPE barchan_audit_lost_total counter\nbarchan_audit_lost_total 10000\n")); err != nil {
		t.Error(err)
	}
}

func TestFollow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	got, ctx := make(chan string, 100), t.Context()
	write(t, auditlog.Config{Path: path, MaxSize: 300, MaxFiles: 50}, func(l *auditlog.Log) {
		reading, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() {
			done <- auditlog.Read(reading, path, auditlog.Filter{}, true, func(e auditlog.Entry) error { got <- e.Name; return nil })
		}()
		for i := range 3 {
			name := fmt.Sprint(i)
			l.Add(auditlog.Entry{Name: name, Object: strings.Repeat("x", 150)}) // each in a file of its own
			eventually.True(t, "the entry is read", func() bool {
				select {
				case read := <-got:
					return read == name
				default:
					return false
				}
			})
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestNilLogRecordsNothing(*testing.T) {
	var l *auditlog.Log
	l.Add(auditlog.Entry{})
}

func BenchmarkAdd(b *testing.B) {
	l, err := auditlog.Open(auditlog.Config{Path: filepath.Join(b.TempDir(), "audit.log"), Log: telemetry.Discard()})
	if err != nil {
		b.Fatal(err)
	}
	go func() { _ = l.Run(b.Context()) }()
	for b.Loop() {
		l.Add(auditlog.Entry{By: auditlog.ByKey, Name: "key-abcdefghij", Namespace: "default", Action: "create sandboxes", Request: "POST /v2/sandboxes", Status: 201, Made: []string{"i6ibp9j1t14s14x0zq1c"}})
	}
}

// TestLongNamesAreCut: a key of any scope sends paths of a megabyte. A few hundred of them would push all else out of the log, and those
// that wait for a slow disk would take gigabytes.
func TestLongNamesAreCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	long := strings.Repeat("\x00", 1<<20)
	write(t, auditlog.Config{Path: path}, func(l *auditlog.Log) {
		l.Add(auditlog.Entry{By: long, Name: long, Namespace: long, Action: long, Request: long, Object: long, Sandbox: long, Address: long, Result: long})
	})
	if got, err := os.ReadFile(path); err != nil || len(got) > 64<<10 || !strings.Contains(string(got), "\\u0000…") {
		t.Errorf("%d bytes were written: %v", len(got), err)
	}
}
