package apiserver

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/barchan-dev/barchan/internal/telemetry"
)

// A first start that ended before etcd's first entry leaves a log that elects nobody for ever.
func TestFirstStartBrokenOff(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "etcd")
	open := func() {
		t.Helper()
		e, _, err := startEtcd(t.Context(), dir, 0, telemetry.Discard())
		if err != nil {
			t.Fatal(err)
		}
		e.Close()
	}
	if _, err := beginEtcd(dir); err != nil {
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
		t.Errorf("a later start began anew: %v", err)
	}
}
