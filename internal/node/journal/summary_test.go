package journal

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
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
	want := []Summary{{Ref: ref, ID: sandbox.IDOf(ref.UID), Stage: Live, Address: netip.MustParseAddr("10.0.0.2"), StartedAt: started}, {Ref: later}}
	if err != nil || !cmp.Equal(got, want, addresses) {
		t.Errorf("%v: %s", err, cmp.Diff(want, got, addresses))
	}
}

var addresses = cmpopts.EquateComparable(netip.Addr{})

// TestSummariesOfMany: summaries, which decode a part of a row, have what whole rows have, in the same order, and refuse the same rows.
func TestSummariesOfMany(t *testing.T) {
	db, err := bolt.Open(filepath.Join(t.TempDir(), "node.db"), 0o600, &bolt.Options{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	j, err := Open(db)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2*decodedAtOnce + 10 {
		ref := sandbox.Ref{Namespace: "a", Name: fmt.Sprint(i), UID: types.UID(fmt.Sprintf("uid-%04d", i))}
		r := &Row{Stage: Stored, Plan: plan.Plan{Ref: ref, ID: sandbox.IDOf(ref.UID), Image: "x"}, PausedAt: time.Unix(int64(i), 0).UTC()}
		switch i % 50 {
		case 1:
			r.Stage, r.Address = Live, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
		case 2:
			r.Stage = Live // without its address
		case 3:
			r.Kept = "what a later version keeps"
		}
		store(t, j, r)
	}
	var want []Summary
	if err := j.Each(func(r *Row) {
		want = append(want, Summary{Ref: r.Plan.Ref, ID: r.Plan.ID, Stage: r.Stage, Address: r.Address, StartedAt: r.StartedAt, PausedAt: r.PausedAt})
	}, func(key, _ []byte, _ error) {
		want = append(want, Summary{Ref: sandbox.Ref{UID: types.UID(key)}})
	}); err != nil {
		t.Fatal(err)
	}
	if !slices.IsSortedFunc(want, func(a, b Summary) int { return strings.Compare(string(a.Ref.UID), string(b.Ref.UID)) }) || len(want) != 2*decodedAtOnce+10 {
		t.Errorf("%d rows were visited, not all or not in their order", len(want))
	}
	if got, err := j.Summaries(); err != nil || !cmp.Equal(got, want, addresses) {
		t.Errorf("%v: %s", err, cmp.Diff(want, got, addresses))
	}
}
