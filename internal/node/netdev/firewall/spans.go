package firewall

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
)

// span is the addresses from one up to another, which is not part of it; the zero value of that
// means the end of the address space.
type span struct{ from, to netip.Addr }

func spanOf(p netip.Prefix) span { return span{p.Masked().Addr(), after(p.Masked())} }

// intervals are those of prefixes of one family.
func intervals(prefixes []netip.Prefix) []nftables.SetElement {
	var spans []span
	for _, p := range prefixes {
		spans = append(spans, spanOf(p))
	}
	return union(spans)
}

// union writes spans of one family as the half-open intervals that the kernel wants: in order,
// without overlap. One that reaches the end of the address space has no end.
func union(spans []span) (elements []nftables.SetElement) {
	slices.SortFunc(spans, func(a, b span) int { return a.from.Compare(b.from) })
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

// without is what is left of a prefix when others are taken out.
func without(p netip.Prefix, others []netip.Prefix) (left []span) {
	whole, holes := spanOf(p), []span{}
	for _, o := range others {
		if o.Overlaps(p) {
			holes = append(holes, spanOf(o))
		}
	}
	slices.SortFunc(holes, func(a, b span) int { return a.from.Compare(b.from) })
	at := whole.from
	for _, h := range holes {
		if at.Less(h.from) {
			left = append(left, span{at, h.from})
		}
		if !h.to.IsValid() {
			return left
		}
		if at.Less(h.to) {
			at = h.to
		}
	}
	if !whole.to.IsValid() || at.Less(whole.to) {
		left = append(left, span{at, whole.to})
	}
	return left
}

// after is the address that follows a prefix; the zero value if none does.
func after(p netip.Prefix) netip.Addr {
	last := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(last)*8; bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(last)
	return a.Next()
}
