// Package spans computes ranges of addresses as the half-open intervals of nftables sets. It does no I/O.
package spans

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
)

// Span is a range of addresses of one family. to is not part of it; the zero value of to is the end of
// the address space.
type Span struct{ from, to netip.Addr }

func spanOf(p netip.Prefix) Span { return Span{p.Masked().Addr(), after(p.Masked())} }

// Intervals returns the union of prefixes of one family.
func Intervals(prefixes []netip.Prefix) []nftables.SetElement {
	var spans []Span
	for _, p := range prefixes {
		spans = append(spans, spanOf(p))
	}
	return Union(spans)
}

// Union returns spans of one family as intervals in order, without overlap. One that reaches the end of the address space has no end.
func Union(spans []Span) (elements []nftables.SetElement) {
	slices.SortFunc(spans, func(a, b Span) int { return a.from.Compare(b.from) })
	for i := 0; i < len(spans); {
		first, next := spans[i].from, spans[i].to
		for i++; i < len(spans) && next.IsValid() && !next.Less(spans[i].from); i++ {
			if end := spans[i].to; !end.IsValid() || next.Less(end) {
				next = end
			}
		}
		elements = append(elements, nftables.SetElement{Key: first.AsSlice()})
		if !next.IsValid() {
			break // nothing is above it
		}
		elements = append(elements, nftables.SetElement{Key: next.AsSlice(), IntervalEnd: true})
	}
	return elements
}

// Without returns the parts of a prefix that are in none of others.
func Without(p netip.Prefix, others []netip.Prefix) (left []Span) {
	whole, holes := spanOf(p), []Span{}
	for _, o := range others {
		if o.Overlaps(p) {
			holes = append(holes, spanOf(o))
		}
	}
	slices.SortFunc(holes, func(a, b Span) int { return a.from.Compare(b.from) })
	at := whole.from
	for _, h := range holes {
		if at.Less(h.from) {
			left = append(left, Span{at, h.from})
		}
		if !h.to.IsValid() {
			return left
		}
		if at.Less(h.to) {
			at = h.to
		}
	}
	if !whole.to.IsValid() || at.Less(whole.to) {
		left = append(left, Span{at, whole.to})
	}
	return left
}

// after returns the address that follows a prefix; the zero value if none does.
func after(p netip.Prefix) netip.Addr {
	last := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(last)*8; bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(last)
	return a.Next()
}
