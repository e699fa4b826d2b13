package route

import (
	"encoding/binary"
	"hash/maphash"
	"math/bits"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// ids is a persistent map by sandbox ID.
type ids struct {
	seed uint64
	cowMap[idKey, record]
}

func newIDs() ids {
	seed := maphash.Comparable(maphash.MakeSeed(), 0)
	return ids{seed, newPages[idKey, record](func(k idKey) uint64 { return k.hash(seed) })}
}

// idKey is an ID as three words: comparing it needs no further memory access. IDs of other lengths
// than usual are padded with zeros, at least one.
type idKey struct{ a, b, c uint64 }

// usualLength is the length of IDs that sandbox.IDOf makes.
const usualLength = 20

// keyOf reports false for a text that is too long to be an ID.
func keyOf(id sandbox.ID) (k idKey, ok bool) {
	if len(id) == usualLength {
		return idKey{word(id[:8]), word(id[8:16]), word(id[12:])>>32 | 1<<63}, true
	}
	var text [24]byte
	whole := copy(text[:len(text)-1], id) == len(id)
	return idKey{binary.LittleEndian.Uint64(text[:8]), binary.LittleEndian.Uint64(text[8:16]), binary.LittleEndian.Uint64(text[16:])}, whole
}

// word reads eight bytes.
func word(s sandbox.ID) uint64 {
	_ = s[7]
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
		uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
}

// hash need not resist chosen IDs: they are digits of a SHA-256 of what the API server generated.
func (k idKey) hash(seed uint64) uint64 {
	high, low := bits.Mul64(k.a^seed, k.b^0x9e3779b97f4a7c15)
	high, low = bits.Mul64(high^low^k.c, seed|1)
	return high ^ low
}

// get returns nil if there is none.
func (m *ids) get(id sandbox.ID) *record {
	k, ok := keyOf(id)
	if !ok {
		return nil
	}
	return m.find(k.hash(m.seed), k)
}

func (m ids) with(id sandbox.ID, rec record) ids {
	k, _ := keyOf(id)
	m.cowMap = m.cowMap.with(k, rec)
	return m
}

func (m ids) without(id sandbox.ID) ids {
	k, _ := keyOf(id)
	m.cowMap = m.cowMap.without(k)
	return m
}

// names is a persistent map by namespace and name.
type names struct{ cowMap[fullName, sandbox.ID] }

type fullName struct{ namespace, name string }

func newNames() names {
	seed := maphash.MakeSeed()
	return names{newPages[fullName, sandbox.ID](func(n fullName) uint64 { return maphash.Comparable(seed, n) })}
}

func nameOf(r *Route) fullName { return fullName{r.Namespace, r.Name} }

func (m names) with(name fullName, id sandbox.ID) names { return names{m.cowMap.with(name, id)} }

func (m names) without(name fullName) names { return names{m.cowMap.without(name)} }
