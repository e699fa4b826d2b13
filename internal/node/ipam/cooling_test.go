package ipam

import (
	"net/netip"
	"time"
)

// CoolingUntil returns when a cooling address may be leased again.
func (b *Allocator) CoolingUntil(addr netip.Addr) (time.Time, bool) {
	l, ok := b.At(addr)
	return l.Until, ok && l.State == Cooling
}
