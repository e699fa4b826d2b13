package route

import (
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"testing"
)

func TestPagesAgainstMap(t *testing.T) {
	seed := maphash.MakeSeed()
	for name, hash := range map[string]func(int) uint64{
		"spread":     func(k int) uint64 { return maphash.Comparable(seed, k) },
		"one page":   func(k int) uint64 { return maphash.Comparable(seed, k) << (2 * fanBits) },
		"collisions": func(k int) uint64 { return uint64(k % 7) }, //nolint:gosec // k is not negative
	} {
		t.Run(name, func(t *testing.T) { comparePages(t, hash) })
	}
}

func comparePages(t *testing.T, hash func(int) uint64) {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 1))
	x, m := newPages[int, int](hash), map[int]int{}
	var frozen cowMap[int, int]
	var then map[int]int
	for i := range 8000 {
		k := rng.IntN(800)
		if rng.IntN(3) == 0 {
			x = x.without(k)
			delete(m, k)
		} else {
			x = x.with(k, i)
			m[k] = i
		}
		for _, k := range []int{k, rng.IntN(900)} {
			v := x.get(k)
			if want, ok := m[k]; (v != nil) != ok || v != nil && *v != want {
				t.Fatalf("get(%d) = %v, want %d, %v", k, v, want, ok)
			}
		}
		if i == 4000 {
			frozen, then = x, maps.Clone(m)
		}
	}
	same(t, "the last", &x, m)
	same(t, "an old snapshot", &frozen, then)
	n := 0
	x.each(func(int, *int) bool { n++; return n < 3 })
	if n != 3 {
		t.Errorf("each continued after false: %d", n)
	}
	for k := range m {
		x = x.without(k)
	}
	same(t, "the emptied one", &x, nil)
	for _, lists := range x.root {
		if lists == nil {
			continue
		}
		for _, p := range lists {
			if p != nil {
				t.Fatalf("an empty page of %d slots is left", len(p))
			}
		}
	}
}

func same(t *testing.T, what string, x *cowMap[int, int], want map[int]int) {
	t.Helper()
	got := map[int]int{}
	x.each(func(k int, v *int) bool {
		if _, twice := got[k]; twice {
			t.Errorf("%s yields %d twice", what, k)
		}
		got[k] = *v
		return true
	})
	if len(got) != len(want) || x.size != len(want) {
		t.Errorf("%s has %d entries and reports %d, want %d", what, len(got), x.size, len(want))
	}
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s: %d is %d, want %d", what, k, got[k], v)
		}
	}
}

// TestPagesHaveRoom: one that is full would be searched endlessly, and a crowded one for long.
func TestPagesHaveRoom(t *testing.T) {
	var p bucketPage[int, int]
	for n := range 500 {
		p = p.changed(func(int) uint64 { return 0 }, n, &entry[int, int]{n, n}) // all for the same bucket
		have := 0
		p.each(func(*entry[int, int]) bool { have++; return true })
		if have != n+1 || have > maxLoad*len(p) || len(p)&(len(p)-1) != 0 {
			t.Fatalf("%d entries in %d buckets, want %d", have, len(p), n+1)
		}
	}
}
