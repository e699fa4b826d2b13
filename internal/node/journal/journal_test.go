package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// A row is used only if all of it is understood.
func TestDecodeRow(t *testing.T) {
	ref := sandbox.Ref{Namespace: "a", Name: "s", UID: "one"}
	sound := Row{Stage: Live, Plan: plan.Plan{Ref: ref, ID: sandbox.IDOf(ref.UID)}, Address: netip.MustParseAddr("10.0.0.2")}
	for name, tt := range map[string]struct {
		change func(*Row)
		want   string // part of the error; empty for none
	}{
		"sound":               {func(*Row) {}, ""},
		"half made":           {func(r *Row) { r.Stage, r.Address = Making, netip.Addr{} }, ""},
		"another's key":       {func(r *Row) { r.Plan.Ref.UID = "two" }, "another key"},
		"another's ID":        {func(r *Row) { r.Plan.ID = "x" }, "of another sandbox"},
		"a later stage":       {func(r *Row) { r.Stage = "flying" }, "unknown stage"},
		"live, no address":    {func(r *Row) { r.Address = netip.Addr{} }, "has the address"},
		"stored, no address":  {func(r *Row) { r.Stage, r.Address = Stored, netip.Addr{} }, ""},
		"stored, files only":  {func(r *Row) { r.Stage, r.Kept = Stored, agents.SuspendFiles }, ""},
		"unknown kept data":   {func(r *Row) { r.Stage, r.Kept = Stored, "Dreams" }, "unknown kept"},
		"frozen, no address":  {func(r *Row) { r.Stage, r.Address = Paused, netip.Addr{} }, "has the address"},
		"stored, only IPv6":   {func(r *Row) { r.Stage, r.Address = Stored, netip.MustParseAddr("fd00::1") }, "has the address"},
		"removed, no address": {func(r *Row) { r.Stage, r.Address = Removing, netip.Addr{} }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			give := sound
			tt.change(&give)
			value, err := json.Marshal(give)
			if err != nil {
				t.Fatal(err)
			}
			_, err = decodeRow([]byte(ref.UID), value)
			if (err == nil) != (tt.want == "") || (err != nil && !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func FuzzDecodeRow(f *testing.F) {
	f.Add([]byte("one"), []byte(`{"stage":"live","plan":{"ref":{"UID":"one"},"id":"x"},"address":"10.0.0.2"}`))
	f.Add([]byte("one"), []byte(`{}`))
	f.Fuzz(func(t *testing.T, key, value []byte) {
		r, err := decodeRow(key, value)
		if err == nil && r.Stage.Begun() && !r.Address.Is4() && (!r.OnDisk() || r.Address.IsValid()) {
			t.Errorf("row with the address %s in stage %s", r.Address, r.Stage)
		}
	})
}

func openTest(t *testing.T) *Journal {
	t.Helper()
	db, err := bolt.Open(filepath.Join(t.TempDir(), "node.db"), 0o600, &bolt.Options{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	j, err := Open(db)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func store(t *testing.T, j *Journal, r *Row) []byte {
	t.Helper()
	value, err := json.Marshal(r)
	if err == nil {
		err = j.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(sandboxesBucket).Put([]byte(r.Plan.Ref.UID), value) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return value
}

func rowText(t *testing.T, j *Journal, uid types.UID) (value []byte) {
	t.Helper()
	err := j.db.View(func(tx *bolt.Tx) error {
		value = bytes.Clone(tx.Bucket(sandboxesBucket).Get([]byte(uid)))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// Each pair of stages is a transition of the table and is written, or is refused and changes nothing in the row.
func TestMoveOverAllPairs(t *testing.T) {
	j := openTest(t)
	ref := sandbox.Ref{Namespace: "a", Name: "s", UID: "one"}
	for from := range moves {
		for to := range moves {
			before := []byte(nil)
			if err := j.Remove(ref); err != nil {
				t.Fatal(err)
			}
			if from != none {
				before = store(t, j, &Row{Stage: from, Plan: plan.Plan{Ref: ref, ID: sandbox.IDOf(ref.UID)}, Address: netip.MustParseAddr("10.0.0.2")})
			}
			next := &Row{Stage: from, Plan: plan.Plan{Ref: ref, ID: sandbox.IDOf(ref.UID)}, Address: netip.MustParseAddr("10.0.0.3")}
			err := j.Move(next, to)
			after := rowText(t, j, ref.UID)
			switch allowed := slices.Contains(moves[from], to); {
			case allowed && err != nil:
				t.Errorf("%q to %q: %v", from, to, err)
			case allowed:
				r, err := j.Get(ref.UID)
				if err != nil || r == nil || r.Stage != to || r.Address != next.Address {
					t.Errorf("%q to %q: row %+v, %v", from, to, r, err)
				}
			case !errors.Is(err, errs.ErrConflict):
				t.Errorf("%q to %q: error %v, want errs.ErrConflict", from, to, err)
			case !bytes.Equal(before, after):
				t.Errorf("refused %q to %q: row was %s, is %s", from, to, before, after)
			}
			if next.Stage != from {
				t.Errorf("%q to %q: the caller's row is %q", from, to, next.Stage)
			}
		}
	}
}

// The table has each stage, leads to no unknown stage, and every stage can be removed.
func TestMovesTable(t *testing.T) {
	for from, to := range moves {
		for _, s := range to {
			if _, ok := moves[s]; !ok || s == none {
				t.Errorf("%q leads to the unknown %q", from, s)
			}
		}
		if from != none && !slices.Contains(to, Removing) {
			t.Errorf("%q cannot be removed", from)
		}
	}
	if len(moves) != 13 {
		t.Errorf("%d stages, want 13", len(moves))
	}
}

// A row of a later version is not overwritten.
func TestMoveFromUnknownStage(t *testing.T) {
	j := openTest(t)
	r := &Row{Stage: "flying", Plan: plan.Plan{Ref: sandbox.Ref{UID: "one"}}}
	before := store(t, j, r)
	for _, to := range []Stage{Making, Live, Removing} {
		if err := j.Move(r, to); !errors.Is(err, errs.ErrConflict) || !bytes.Equal(before, rowText(t, j, "one")) {
			t.Errorf("to %q: %v", to, err)
		}
	}
}
