// Package rates has the nftables rules that bound how much each port of a bridge sends and
// receives. It knows ports by the beginning of their names, and no addresses.
package rates

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/match"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/nftset"
)

const (
	// minBytes fits the largest packet (64 KiB) into what a port may send at once.
	minBytes = 128 << 10
	// maxBytes and maxPackets are what the kernel can count in nanoseconds.
	maxBytes   = 8 << 30
	maxPackets = 100_000_000

	// maxPorts is more than the ports that a bridge can have (1,023).
	maxPorts = 4096
	// forgetAfter is the time without a packet after which a port's bucket is removed; by then it
	// would be full.
	forgetAfter = time.Minute
	// first is before all other chains of a bridge: a packet too many costs as little as possible.
	first = -310
)

// Limits bound one port, in each direction by itself. 0 is no bound.
type Limits struct {
	// Bytes per second; as many again may come at once.
	Bytes uint64
	// Packets per second; a tenth of them may come at once. A packet of several segments counts
	// once, as it costs the kernel once.
	Packets uint64
}

// Check refuses limits that the kernel cannot keep.
func (l Limits) Check() error {
	switch {
	case l.Bytes != 0 && (l.Bytes < minBytes || l.Bytes > maxBytes):
		return fmt.Errorf("network bytes %d per second: want 0 or %d to %d: %w", l.Bytes, minBytes, maxBytes, errs.ErrInvalid)
	case l.Packets > maxPackets:
		return fmt.Errorf("network packets %d per second: want at most %d: %w", l.Packets, maxPackets, errs.ErrInvalid)
	}
	return nil
}

// direction is one way through a bridge.
type direction struct {
	name string
	hook *nftables.ChainHook
	link expr.MetaKey
}

// Add adds chains and sets to a table of family bridge. They bound each port whose name has the
// prefix.
func Add(conn *nftables.Conn, table *nftables.Table, prefix string, l Limits) error {
	for _, d := range []direction{
		{"sent", nftables.ChainHookPrerouting, expr.MetaKeyIIFNAME},
		{"received", nftables.ChainHookPostrouting, expr.MetaKeyOIFNAME},
	} {
		bounds := l.bounds(d.name)
		if len(bounds) == 0 {
			continue
		}
		chain := conn.AddChain(&nftables.Chain{
			Name: d.name, Table: table, Type: nftables.ChainTypeFilter,
			Hooknum: d.hook, Priority: new(nftables.ChainPriority(first)),
		})
		for _, name := range slices.Sorted(maps.Keys(bounds)) {
			set := &nftables.Set{
				Table: table, Name: name, KeyType: nftables.TypeIFName, Dynamic: true, Size: maxPorts, HasTimeout: true, Timeout: forgetAfter,
			}
			if err := nftset.AddEmpty(conn, set); err != nil {
				return err
			}
			conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append([]expr.Any{
				&expr.Meta{Key: d.link, Register: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte(prefix)},
				&expr.Dynset{SrcRegKey: 1, SetName: set.Name, SetID: set.ID, Operation: unix.NFT_DYNSET_OP_UPDATE, Exprs: []expr.Any{bounds[name]}},
			}, match.Drop()...)})
		}
	}
	return nil
}

// bounds match what exceeds the limits, by the names of their sets.
func (l Limits) bounds(direction string) map[string]*expr.Limit {
	bounds := map[string]*expr.Limit{}
	if l.Packets > 0 {
		bounds[direction+"-packets"] = &expr.Limit{
			Type: expr.LimitTypePkts, Rate: l.Packets, Unit: expr.LimitTimeSecond, Over: true, Burst: uint32(max(1, l.Packets/10)),
		}
	}
	if l.Bytes > 0 { // the kernel's bucket has a second's bytes and the burst
		bounds[direction+"-bytes"] = &expr.Limit{
			Type: expr.LimitTypePktBytes, Rate: l.Bytes, Unit: expr.LimitTimeSecond, Over: true, Burst: uint32(min(l.Bytes/100, math.MaxUint32)),
		}
	}
	return bounds
}
