package journal

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// TestReadSummaries reads a database that no node uses, with a row of a later version, and refuses one in use.
func TestReadSummaries(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	if got, err := ReadSummaries(path); err != nil || got != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadSummaries(path); err != nil || got != nil {
		t.Errorf("without the bucket: %v, %v", got, err)
	}
	if db, err = bolt.Open(path, 0o600, &bolt.Options{NoSync: true}); err != nil {
		t.Fatal(err)
	}
	j, err := Open(db)
	if err != nil {
		t.Fatal(err)
	}
	ref := sandbox.Ref{Namespace: "a", Name: "s", UID: "one"}
	started := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	store(t, j, &Row{Stage: Live, Plan: plan.Plan{Ref: ref, ID: sandbox.IDOf(ref.UID)}, Address: netip.MustParseAddr("10.0.0.2"), StartedAt: started})
	later := sandbox.Ref{UID: types.UID("two")}
	store(t, j, &Row{Stage: "flying", Plan: plan.Plan{Ref: later, ID: sandbox.IDOf(later.UID)}})
	if _, err := ReadSummaries(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("of a node that runs: %v", err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := ReadSummaries(path)
	want := []Summary{{Ref: ref, ID: sandbox.IDOf(ref.UID), Stage: Live, StartedAt: started}, {Ref: later}}
	if err != nil || !cmp.Equal(got, want) {
		t.Errorf("%v: %s", err, cmp.Diff(want, got))
	}
}
