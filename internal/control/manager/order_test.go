package manager

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
)

// TestOrderWithinASecond: lists have the newest first, however a sandbox came to be.
func TestOrderWithinASecond(t *testing.T) { synctest.Test(t, testOrderWithinASecond) }

func testOrderWithinASecond(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(time.Second)))
	second := time.Now()
	var want []string // newest first
	made := func(id string) {
		want = slices.Insert(slices.DeleteFunc(want, func(old string) bool { return old == id }), 0, id)
		time.Sleep(20 * time.Millisecond)
	}
	for i := range 12 {
		if i%3 == 1 {
			f.cluster.Fill(t, team, "base", 1)
		}
		v := f.mustCreate(t, request("base"))
		made(string(v.ID))
		if i%4 == 3 { // resumed, it has begun again
			first := want[len(want)-1]
			if err := f.Sandboxes.Pause(ctx, team, first, nil); err != nil {
				t.Fatal(err)
			}
			if _, _, err := f.Sandboxes.Connect(ctx, team, first, time.Hour, nil); err != nil {
				t.Fatal(err)
			}
			made(first)
		}
	}
	fork, err := f.Creates.Fork(ctx, forkRequest(sandboxes.Sandbox{ID: f.mustGet(t, want[0]).ID}, 1))
	if err != nil || fork[0].Err != nil {
		t.Fatal(err, fork)
	}
	made(string(fork[0].Sandbox.ID))
	if !time.Now().Truncate(time.Second).Equal(second) {
		t.Fatalf("it took %s, want all within one second", time.Since(second))
	}
	for _, limit := range []int{1, 5, 100} {
		var got []string
		for req := (sandboxes.ListRequest{Namespace: team, Limit: limit}); ; {
			page, err := f.Sandboxes.List(ctx, req)
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range page.Items {
				got = append(got, string(v.ID))
			}
			if req.Cursor = page.Next; req.Cursor == "" {
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("limit %d: got %v, want %v", limit, got, want)
		}
	}
}

func (f fixture) mustGet(t *testing.T, id string) sandboxes.Sandbox {
	t.Helper()
	v, err := f.Sandboxes.Get(t.Context(), team, id)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestOrderOfSnapshotsAndKeysWithinASecond: for any names.
func TestOrderOfSnapshotsAndKeysWithinASecond(t *testing.T) {
	synctest.Test(t, testOrderOfSnapshotsAndKeysWithinASecond)
}

func testOrderOfSnapshotsAndKeysWithinASecond(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	names := []string{"b:2", "a:9", "c:1", "a:0", "z:z", "b:1"}
	for _, name := range names {
		f.mustSnapshot(t, v, name)
		if _, _, err := f.Keys.Create(t.Context(), apikeys.Identity{Namespace: team}, apikeys.New{Description: name}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	keys, err := f.Keys.List(t.Context(), team)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, k := range keys {
		got = append(got, k.Description)
	}
	if !slices.Equal(got, names) {
		t.Errorf("keys are %v, want %v: the oldest first", got, names)
	}
	slices.Reverse(names)
	got = nil
	for req := (snapshots.ListRequest{Namespace: team, Limit: 2}); ; {
		page, next, err := f.Snapshots.List(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		for i := range page {
			got = append(got, page[i].ID)
		}
		if req.Cursor = next; next == "" {
			break
		}
	}
	if !slices.Equal(got, names) {
		t.Errorf("snapshots are %v, want %v: the newest first", got, names)
	}
	if newest, err := f.Snapshots.Find(t.Context(), team, "a"); err != nil || newest.SnapshotID() != "a:0" {
		t.Errorf("the newest of a is %s, %v", newest.SnapshotID(), err)
	}
}
