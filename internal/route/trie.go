package route

import (
	"hash/maphash"
	"math/bits"
	"slices"
)

// trie is a persistent map: with and without return a new one that shares all but the path to
// the changed entry, so that a write costs the same few hundred bytes at any size. The zero
// value is not usable; start with newTrie.
type trie[K comparable, V any] struct {
	seed maphash.Seed
	root *branch[K, V]
	size int
}

const (
	levelBits = 6
	levelMask = 1<<levelBits - 1
	hashBits  = 64
)

type branch[K comparable, V any] struct {
	present uint64 // which of the 64 ways exist; slots has one entry for each
	slots   []slot[K, V]
}

// slot is either a branch or a leaf.
type slot[K comparable, V any] struct {
	branch *branch[K, V]
	leaf   *leaf[K, V]
}

type leaf[K comparable, V any] struct {
	hash  uint64
	key   K
	value V
	next  *leaf[K, V] // of the same hash in all 64 bits
}

func newTrie[K comparable, V any]() trie[K, V] {
	return trie[K, V]{seed: maphash.MakeSeed(), root: &branch[K, V]{}}
}

func (t *trie[K, V]) get(key K) (value V, ok bool) {
	h := maphash.Comparable(t.seed, key)
	b := t.root
	for shift := uint(0); ; shift += levelBits {
		bit := uint64(1) << (h >> shift & levelMask)
		if b.present&bit == 0 {
			return value, false
		}
		s := &b.slots[bits.OnesCount64(b.present&(bit-1))]
		if s.branch != nil {
			b = s.branch
			continue
		}
		for l := s.leaf; l != nil; l = l.next {
			if l.key == key {
				return l.value, true
			}
		}
		return value, false
	}
}

// with returns the map in which key has value.
func (t trie[K, V]) with(key K, value V) trie[K, V] {
	if _, had := t.get(key); !had {
		t.size++
	}
	t.root = t.root.with(&leaf[K, V]{hash: maphash.Comparable(t.seed, key), key: key, value: value}, 0)
	return t
}

// without returns the map that lacks key.
func (t trie[K, V]) without(key K) trie[K, V] {
	if _, had := t.get(key); !had {
		return t
	}
	t.size--
	if t.root = t.root.without(key, maphash.Comparable(t.seed, key), 0); t.root == nil {
		t.root = &branch[K, V]{}
	}
	return t
}

// each calls yield for every entry, in no order, until it returns false.
func (t *trie[K, V]) each(yield func(K, V) bool) { t.root.each(yield) }

func (b *branch[K, V]) with(add *leaf[K, V], shift uint) *branch[K, V] {
	bit := uint64(1) << (add.hash >> shift & levelMask)
	at := bits.OnesCount64(b.present & (bit - 1))
	if b.present&bit == 0 {
		return &branch[K, V]{present: b.present | bit, slots: slices.Insert(slices.Clone(b.slots), at, slot[K, V]{leaf: add})}
	}
	c := &branch[K, V]{present: b.present, slots: slices.Clone(b.slots)}
	old := b.slots[at]
	switch {
	case old.branch != nil:
		c.slots[at].branch = old.branch.with(add, shift+levelBits)
	case old.leaf.hash == add.hash:
		add.next = old.leaf.without(add.key)
		c.slots[at].leaf = add
	default:
		c.slots[at] = slot[K, V]{branch: split(old.leaf, add, shift+levelBits)}
	}
	return c
}

// split makes the branch that tells two leaves of different hashes apart.
func split[K comparable, V any](a, b *leaf[K, V], shift uint) *branch[K, V] {
	wayA, wayB := a.hash>>shift&levelMask, b.hash>>shift&levelMask
	if wayA == wayB && shift < hashBits {
		return &branch[K, V]{present: 1 << wayA, slots: []slot[K, V]{{branch: split(a, b, shift+levelBits)}}}
	}
	if wayA > wayB {
		a, b = b, a
	}
	return &branch[K, V]{present: 1<<wayA | 1<<wayB, slots: []slot[K, V]{{leaf: a}, {leaf: b}}}
}

// without is nil when nothing is left.
func (b *branch[K, V]) without(key K, hash uint64, shift uint) *branch[K, V] {
	bit := uint64(1) << (hash >> shift & levelMask)
	at := bits.OnesCount64(b.present & (bit - 1))
	var left slot[K, V]
	if old := b.slots[at]; old.branch != nil {
		left.branch = old.branch.without(key, hash, shift+levelBits)
		if l := left.branch; l != nil && len(l.slots) == 1 && l.slots[0].leaf != nil {
			left = l.slots[0]
		}
	} else {
		left.leaf = old.leaf.without(key)
	}
	if left.branch == nil && left.leaf == nil {
		if len(b.slots) == 1 {
			return nil
		}
		return &branch[K, V]{present: b.present &^ bit, slots: slices.Delete(slices.Clone(b.slots), at, at+1)}
	}
	c := &branch[K, V]{present: b.present, slots: slices.Clone(b.slots)}
	c.slots[at] = left
	return c
}

func (b *branch[K, V]) each(yield func(K, V) bool) bool {
	for _, s := range b.slots {
		if s.branch != nil {
			if !s.branch.each(yield) {
				return false
			}
			continue
		}
		for l := s.leaf; l != nil; l = l.next {
			if !yield(l.key, l.value) {
				return false
			}
		}
	}
	return true
}

// without returns the chain that lacks key, sharing what it can.
func (l *leaf[K, V]) without(key K) *leaf[K, V] {
	if l == nil {
		return nil
	}
	if l.key == key {
		return l.next
	}
	c := *l
	c.next = l.next.without(key)
	return &c
}
