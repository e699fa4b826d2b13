package route

import (
	"math/rand/v2"
	"testing"
)

func TestTrieAgainstMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	x, m := newTrie[int, int](), map[int]int{}
	var frozen trie[int, int]
	var frozenLen int
	for i := range 20_000 {
		k := rng.IntN(3000)
		if rng.IntN(3) == 0 {
			x = x.without(k)
			delete(m, k)
		} else {
			x = x.with(k, i)
			m[k] = i
		}
		if v, ok := x.get(k); ok != (m[k] != 0 || hasKey(m, k)) || v != m[k] {
			t.Fatalf("get(%d) = %d, %v", k, v, ok)
		}
		if i == 10_000 {
			frozen, frozenLen = x, len(m)
		}
	}
	if x.size != len(m) {
		t.Fatalf("size %d, want %d", x.size, len(m))
	}
	n := 0
	x.each(func(k, v int) bool {
		n++
		if m[k] != v {
			t.Errorf("each: %d is %d, want %d", k, v, m[k])
		}
		return true
	})
	if n != len(m) {
		t.Errorf("each yielded %d of %d", n, len(m))
	}
	n = 0
	frozen.each(func(int, int) bool { n++; return true })
	if n != frozenLen {
		t.Errorf("an old snapshot changed: %d entries, had %d", n, frozenLen)
	}
	for k := range m {
		x = x.without(k)
	}
	if x.size != 0 || len(x.root.slots) != 0 {
		t.Errorf("emptied trie has %d entries, %d slots", x.size, len(x.root.slots))
	}
}

func hasKey(m map[int]int, k int) bool { _, ok := m[k]; return ok }

// TestTrieCollisions uses leaves of equal and nearly equal hashes.
func TestTrieCollisions(t *testing.T) {
	b := &branch[string, int]{}
	for i, k := range []string{"a", "b", "c", "b"} {
		b = b.with(&leaf[string, int]{hash: 42, key: k, value: i}, 0)
	}
	b = b.with(&leaf[string, int]{hash: 42 | 1<<63, key: "far", value: 9}, 0)
	count := func(b *branch[string, int]) map[string]int {
		m := map[string]int{}
		b.each(func(k string, v int) bool { m[k] = v; return true })
		return m
	}
	if m := count(b); len(m) != 4 || m["b"] != 3 || m["far"] != 9 {
		t.Fatalf("got %v", m)
	}
	less := b.without("a", 42, 0)
	if m := count(less); len(m) != 3 || len(count(b)) != 4 {
		t.Fatalf("got %v", m)
	}
	less = less.without("far", 42|1<<63, 0).without("b", 42, 0)
	if less = less.without("c", 42, 0); less != nil {
		t.Errorf("left %v", count(less))
	}
}
