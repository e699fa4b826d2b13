package registry

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// TestIndexes: what is found by ID, name and address is what a search of all handles finds.
func TestIndexes(t *testing.T) {
	g := New(Config{})
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 3000 {
		ref := sandbox.Ref{Namespace: fmt.Sprint("n", rng.IntN(2)), Name: fmt.Sprint("s", rng.IntN(5)), UID: types.UID(fmt.Sprint(rng.IntN(30)))}
		if known := g.Lookup(ref.UID); known != nil {
			ref = known.Ref // a UID has one name
		}
		u, addr := g.Of(ref), netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(4))})
		switch rng.IntN(4) {
		case 0:
			u.SetRow(&journal.Row{Address: addr})
		case 1:
			u.SetRow(&journal.Row{}) // its address is released
		case 2:
			u.SetRow(nil)
			g.Drop(u)
		}
		all := g.All()
		id := sandbox.IDOf(ref.UID)
		at := slices.IndexFunc(all, func(u *Handle) bool { return u.ID == id })
		var want *journal.Row
		if at >= 0 {
			want = all[at].Row()
		}
		if got := g.RowOf(id); got != want {
			t.Fatalf("step %d: row %v, want %v", i, got, want)
		}
		done, free := g.BlockCreate(string(id))
		if free == (at >= 0) {
			t.Fatalf("step %d: its creation can be blocked: %v", i, free)
		}
		if free {
			done()
		}
		same(t, "address", g.At(addr), all, func(u *Handle) bool { r := u.Row(); return r != nil && r.Address == addr })
		same(t, "name", g.named(nameOf(ref)), all, func(u *Handle) bool { return u.Ref.Namespace == ref.Namespace && u.Ref.Name == ref.Name })
	}
	for _, u := range g.All() {
		u.SetRow(nil)
		g.Drop(u)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := len(g.byID) + len(g.byName) + len(g.byAddress); n > 0 {
		t.Errorf("%d entries are left of no handles", n)
	}
}

func same(t *testing.T, what string, got, all []*Handle, is func(*Handle) bool) {
	t.Helper()
	want := 0
	for _, u := range all {
		if is(u) {
			if want++; !slices.Contains(got, u) {
				t.Fatalf("by %s %s is not found", what, u.Ref.UID)
			}
		}
	}
	if len(got) != want {
		t.Fatalf("by %s %d are found, want %d", what, len(got), want)
	}
}
