package ipam

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Widest and narrowest subnets, in bits of their prefix.
const (
	widest    = 8
	narrowest = 30
)

// CheckSubnet reports an errs.ErrInvalid for a subnet that cannot be allocated from.
func CheckSubnet(p netip.Prefix) error {
	if !p.IsValid() || !p.Addr().Is4() || p.Bits() < widest || p.Bits() > narrowest {
		return fmt.Errorf("subnet %s: want an IPv4 prefix from /%d to /%d: %w", p, widest, narrowest, errs.ErrInvalid)
	}
	return nil
}

// Beside returns the IPv6 address of an IPv4 lease: the prefix with the IPv4 address in its low 32
// bits, so that one lease covers both. It is the zero Addr without a prefix, for a prefix longer
// than 96 bits, or if v4 is not IPv4.
func Beside(subnet6 netip.Prefix, v4 netip.Addr) netip.Addr {
	if !subnet6.IsValid() || !subnet6.Addr().Is6() || subnet6.Bits() > 96 || !v4.Is4() {
		return netip.Addr{}
	}
	b, low := subnet6.Masked().Addr().As16(), v4.As4()
	copy(b[12:], low[:])
	return netip.AddrFrom16(b)
}

// space finds free addresses of a subnet in nearly constant time. Addresses are offsets from the
// subnet's first.
type space struct {
	first uint32
	size  uint32
	free  int // addresses that are not taken
	// taken has a bit per address; full has a bit per word of taken without a free address. Bits
	// beyond the last address are set in both.
	taken, full []uint64
}

const wordBits = 64

func newSpace(p netip.Prefix) *space {
	first := p.Masked().Addr().As4()
	s := &space{first: binary.BigEndian.Uint32(first[:]), size: 1 << (32 - p.Bits()), free: 1 << (32 - p.Bits())}
	words := (s.size + wordBits - 1) / wordBits
	s.taken, s.full = make([]uint64, words), make([]uint64, (words+wordBits-1)/wordBits)
	if rest := s.size % wordBits; rest != 0 {
		s.taken[words-1] = ^uint64(0) << rest
	}
	if rest := words % wordBits; rest != 0 {
		s.full[len(s.full)-1] = ^uint64(0) << rest
	}
	return s
}

// offset is valid for addresses of the subnet only.
func (s *space) offset(addr netip.Addr) uint32 {
	b := addr.As4()
	return binary.BigEndian.Uint32(b[:]) - s.first
}

func (s *space) addr(offset uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], s.first+offset)
	return netip.AddrFrom4(b)
}

func (s *space) isTaken(offset uint32) bool {
	return s.taken[offset/wordBits]&(1<<(offset%wordBits)) != 0
}

func (s *space) set(offset uint32, taken bool) {
	if s.isTaken(offset) == taken {
		return
	}
	word := offset / wordBits
	s.taken[word] ^= 1 << (offset % wordBits)
	if taken {
		s.free--
	} else {
		s.free++
	}
	if s.taken[word] == ^uint64(0) {
		s.full[word/wordBits] |= 1 << (word % wordBits)
	} else {
		s.full[word/wordBits] &^= 1 << (word % wordBits)
	}
}

// follow finds the next free address, and wraps around at the end of the subnet.
func (s *space) follow(offset uint32) (uint32, bool) {
	if offset+1 < s.size {
		if free, ok := s.from(offset + 1); ok {
			return free, true
		}
	}
	return s.from(0)
}

// from finds the first free address at or above an offset.
func (s *space) from(offset uint32) (uint32, bool) {
	word := offset / wordBits
	if free := ^s.taken[word] & (^uint64(0) << (offset % wordBits)); free != 0 {
		return word*wordBits + uint32(bits.TrailingZeros64(free)), true
	}
	word++
	mask := ^uint64(0) << (word % wordBits)
	for w := word / wordBits; w < uint32(len(s.full)); w++ {
		if some := ^s.full[w] & mask; some != 0 {
			word = w*wordBits + uint32(bits.TrailingZeros64(some))
			return word*wordBits + uint32(bits.TrailingZeros64(^s.taken[word])), true
		}
		mask = ^uint64(0)
	}
	return 0, false
}
