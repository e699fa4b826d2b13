package firewall

import (
	"fmt"
	"strconv"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/match"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/nftset"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/spans"
)

// Bounds have a chain of their own, to which a sandbox's chain jumps first. What they grant
// returns to be judged by the rest of the policy, and all else is refused.
const (
	kindBounds = ".bounds"
	kindGrant  = ".grant"
)

// addBounds adds the chain of a policy's bounds, and the jump to it.
func (r *Rules) addBounds(conn *nftables.Conn, chain *nftables.Chain, next *placed) error {
	b := next.policy.Bounds
	if !b.On {
		return nil
	}
	next.bounds = next.chain + kindBounds
	bounds := conn.AddChain(&nftables.Chain{Name: next.bounds, Table: r.egress.table})
	r.rule(conn, chain, []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: next.bounds}})
	back := []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}
	if b.DNS != "" { // at which servers is for the instance's table to say
		for _, number := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			r.rule(conn, bounds, match.ToDNS(number), back)
		}
	}
	for i, grant := range b.Grants {
		sets, err := r.addGrantSets(conn, next, i)
		if err != nil {
			return err
		}
		for family, set := range sets {
			if set == nil {
				continue
			}
			for _, ports := range grant.Ports {
				r.rule(conn, bounds, match.ToPorts(ports), inSet(set, family), back)
			}
			if len(grant.Ports) == 0 {
				r.rule(conn, bounds, inSet(set, family), back)
			}
		}
	}
	r.rule(conn, bounds, refuse())
	return nil
}

// addGrantSets adds the sets of a grant, for the families of which it has any address.
func (r *Rules) addGrantSets(conn *nftables.Conn, next *placed, i int) (sets [2]*nftables.Set, err error) {
	var own [2][]spans.Span
	for _, r := range next.policy.Bounds.Grants[i].Ranges {
		family := familyOf(r.Prefix.Addr())
		own[family] = append(own[family], spans.Without(r.Prefix, r.Except)...)
	}
	for family, f := range families {
		if len(own[family]) == 0 {
			continue
		}
		set := &nftables.Set{Table: r.egress.table, Name: next.chain + kindGrant + strconv.Itoa(i) + separator + "ip" + f.suffix, Interval: true, KeyType: f.key}
		if err := nftset.Add(conn, set, spans.Union(own[family])); err != nil {
			return sets, fmt.Errorf("grant %d: %w", i, err)
		}
		sets[family], next.sets = set, append(next.sets, set.Name)
	}
	return sets, nil
}
