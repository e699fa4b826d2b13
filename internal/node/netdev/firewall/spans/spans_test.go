package spans

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestIntervals(t *testing.T) {
	for _, tt := range []struct {
		give []string
		want string
	}{
		{nil, ""},
		{[]string{"10.0.0.0/8", "10.1.0.0/16", "10.0.0.1/32"}, "10.0.0.0-11.0.0.0"},
		{[]string{"10.1.0.0/16", "10.0.0.0/16", "10.3.0.0/16"}, "10.0.0.0-10.2.0.0 10.3.0.0-10.4.0.0"},
		{[]string{"0.0.0.0/0", "1.2.3.4/32"}, "0.0.0.0-"},
		{[]string{"128.0.0.0/1", "224.0.0.0/3"}, "128.0.0.0-"},
		{[]string{"255.255.255.255/32"}, "255.255.255.255-"},
		{[]string{"::/0"}, "::-"},
		{[]string{"fd00::/8", "fd12::/16"}, "fd00::-fe00::"},
	} {
		var prefixes []netip.Prefix
		for _, s := range tt.give {
			prefixes = append(prefixes, netip.MustParsePrefix(s))
		}
		var got strings.Builder
		for _, e := range Intervals(prefixes) {
			a, _ := netip.AddrFromSlice(e.Key)
			if e.IntervalEnd {
				fmt.Fprintf(&got, "%s", a)
				continue
			}
			if got.Len() > 0 {
				got.WriteByte(' ')
			}
			fmt.Fprintf(&got, "%s-", a)
		}
		if got.String() != tt.want {
			t.Errorf("Intervals(%v) = %s, want %s", tt.give, got.String(), tt.want)
		}
	}
}

// What is left of a prefix has every address of it that no hole has, and no other.
func TestWithout(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, base := range []string{"10.0.0.0", "255.255.252.0"} {
		near := func() netip.Addr { return somewhereIn(r, netip.PrefixFrom(netip.MustParseAddr(base), 22)) }
		for range 300 {
			whole := netip.PrefixFrom(near(), 20+r.IntN(13)).Masked()
			var holes []netip.Prefix
			for range r.IntN(5) {
				holes = append(holes, netip.PrefixFrom(near(), 20+r.IntN(13)).Masked())
			}
			left := Without(whole, holes)
			for range 100 {
				a := near()
				want := whole.Contains(a) && !slices.ContainsFunc(holes, func(h netip.Prefix) bool { return h.Contains(a) })
				got := slices.ContainsFunc(left, func(s Span) bool { return !a.Less(s.from) && (!s.to.IsValid() || a.Less(s.to)) })
				if got != want {
					t.Fatalf("%s without %v = %v: has %s should be %t", whole, holes, left, a, want)
				}
			}
		}
	}
}

func somewhereIn(r *rand.Rand, prefix netip.Prefix) netip.Addr {
	b := prefix.Addr().AsSlice()
	for bit := prefix.Bits(); bit < len(b)*8; bit++ {
		if r.IntN(2) == 0 {
			b[bit/8] ^= 0x80 >> (bit % 8)
		}
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
