package route

import "math/bits"

// cowMap is a persistent map: with and without return a new map that shares all but the page of the
// changed entry and the two short lists that lead to it, so that a write copies a few kilobytes at any
// size. The results of get must not be changed. Make an empty one with newPages.
//
// A lookup costs mainly cache misses and branch mispredictions. There are two likely misses, the
// bucket and the entry, and few such branches: the tags of a bucket are compared all at once. The
// lists stay in the cache.
type cowMap[K comparable, V any] struct {
	hash func(K) uint64
	root *[fan]*[fan]bucketPage[K, V]
	size int
}

// newPages returns an empty map. A hash must spread over all 64 bits.
func newPages[K comparable, V any](hash func(K) uint64) cowMap[K, V] {
	return cowMap[K, V]{hash: hash}
}

const (
	fanBits = 5
	fan     = 1 << fanBits // of each of the two lists
	fanMask = fan - 1

	// ways is the capacity of a bucket: with their tags, its entries fill one cache line.
	ways = 7
	// maxLoad is the maximum of entries per bucket of a page. Few buckets overflow then.
	maxLoad = 4
)

// bucketPage is an immutable hash table. Its length is a power of two. An entry is in its own bucket,
// or in the first one after it with a free slot. Nil: it is empty.
type bucketPage[K comparable, V any] []bucket[K, V]

// bucket has its entries from the first slot on. The tags are bits of their hashes, one byte for each;
// the tag of an entry is never zero.
type bucket[K comparable, V any] struct {
	tags    uint64
	entries [ways]*entry[K, V]
}

type entry[K comparable, V any] struct {
	key   K
	value V
}

// place returns where a hash belongs: the list, the page in it, and the first bucket.
func place(hash uint64) (list, at, from uint64) {
	return hash & fanMask, hash >> fanBits & fanMask, hash >> (2 * fanBits)
}

// Each byte of a word.
const (
	eachByte = 0x0101010101010101
	highBits = 0x8080808080808080
)

// tagOf returns the bits of a hash that place uses last, and one that makes it nonzero.
func tagOf(hash uint64) uint64 { return hash>>57 | 0x80 }

// get returns nil if the key has no value.
func (m *cowMap[K, V]) get(key K) *V { return m.find(m.hash(key), key) }

// find is get for a caller that has the hash.
func (m *cowMap[K, V]) find(hash uint64, key K) *V {
	if m.root == nil {
		return nil
	}
	list, at, i := place(hash)
	lists := m.root[list]
	if lists == nil {
		return nil
	}
	p := lists[at]
	if len(p) == 0 {
		return nil
	}
	wanted := tagOf(hash) * eachByte
	for mask := uint64(len(p) - 1); ; i++ { //nolint:gosec // it is not empty
		b := &p[i&mask]
		// A zero byte of differ becomes a high bit; bytes above one may wrongly do so too.
		differ := b.tags ^ wanted
		for same := (differ - eachByte) &^ differ & highBits; same != 0; same &= same - 1 {
			way := bits.TrailingZeros64(same) / 8
			if way < ways && b.entries[way] != nil && b.entries[way].key == key {
				return &b.entries[way].value
			}
		}
		if !b.full() {
			return nil
		}
	}
}

func (b *bucket[K, V]) full() bool { return b.entries[ways-1] != nil }

// with returns the map in which key has value.
func (m cowMap[K, V]) with(key K, value V) cowMap[K, V] {
	if m.get(key) == nil {
		m.size++
	}
	return m.changed(key, &entry[K, V]{key, value})
}

// without returns the map that lacks key.
func (m cowMap[K, V]) without(key K) cowMap[K, V] {
	if m.get(key) == nil {
		return m
	}
	m.size--
	return m.changed(key, nil)
}

// changed returns a map with another entry for a key, or with none.
func (m cowMap[K, V]) changed(key K, to *entry[K, V]) cowMap[K, V] {
	var root [fan]*[fan]bucketPage[K, V]
	var lists [fan]bucketPage[K, V]
	list, at, _ := place(m.hash(key))
	if m.root != nil {
		root = *m.root
	}
	if root[list] != nil {
		lists = *root[list]
	}
	lists[at] = lists[at].changed(m.hash, key, to)
	root[list] = &lists
	m.root = &root
	return m
}

// changed returns a page with another entry for a key, or with none.
func (p bucketPage[K, V]) changed(hash func(K) uint64, key K, to *entry[K, V]) bucketPage[K, V] {
	n := 0
	if to != nil {
		n++
	}
	p.each(func(e *entry[K, V]) bool {
		if e.key != key {
			n++
		}
		return true
	})
	if n == 0 {
		return nil
	}
	fresh := make(bucketPage[K, V], 1<<bits.Len(uint((n-1)/maxLoad))) //nolint:gosec // n is not negative
	p.each(func(e *entry[K, V]) bool {
		if e.key != key {
			fresh.put(hash(e.key), e)
		}
		return true
	})
	if to != nil {
		fresh.put(hash(key), to)
	}
	return fresh
}

// put adds an entry with a new key. The page must not be published yet.
func (p bucketPage[K, V]) put(hash uint64, e *entry[K, V]) {
	_, _, i := place(hash)
	mask := uint64(len(p) - 1) //nolint:gosec // it is not empty
	for p[i&mask].full() {
		i++
	}
	b := &p[i&mask]
	way := 0
	for b.entries[way] != nil {
		way++
	}
	b.entries[way] = e
	b.tags |= tagOf(hash) << (8 * way)
}

// each calls yield for every entry, until it returns false; it reports whether none did.
func (p bucketPage[K, V]) each(yield func(*entry[K, V]) bool) bool {
	for i := range p {
		for _, e := range p[i].entries {
			if e == nil {
				break
			}
			if !yield(e) {
				return false
			}
		}
	}
	return true
}

// each calls yield for every entry, in no order, until it returns false.
func (m *cowMap[K, V]) each(yield func(K, *V) bool) {
	if m.root == nil {
		return
	}
	for _, lists := range m.root {
		if lists == nil {
			continue
		}
		for _, p := range lists {
			if !p.each(func(e *entry[K, V]) bool { return yield(e.key, &e.value) }) {
				return
			}
		}
	}
}
