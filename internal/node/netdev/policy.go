package netdev

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/egress"
)

// beforeOthers is where our filters hook: before the machine's own, whose accept is final
// only for themselves while our drop is final for all.
const beforeOthers = -10

// addInet adds the chains that decide where sandboxes may send to.
func (r *ruleset) addInet(conn *nftables.Conn) error {
	sets, err := r.addAddressSets(conn)
	if err != nil {
		return err
	}
	r.addInput(conn, sets)
	r.addForward(conn, sets)
	r.addTranslation(conn)
	return nil
}

// addressSets are the sets of destinations, each by family.
type addressSets map[string][2]*nftables.Set

func (r *ruleset) addAddressSets(conn *nftables.Conn) (addressSets, error) {
	ground := r.ground()
	var resolvers []netip.Prefix
	for _, a := range slices.Concat(ground.Gateways, ground.Resolvers) {
		resolvers = append(resolvers, netip.PrefixFrom(a, a.BitLen()))
	}
	sets := addressSets{}
	for name, prefixes := range map[string][]netip.Prefix{
		setNotPublic: egress.NotPublic(), setReachable: ground.Reachable, setResolvers: resolvers,
	} {
		var err error
		if sets[name], err = addPrefixSets(conn, r.inet, name, prefixes); err != nil {
			return nil, err
		}
	}
	return sets, nil
}

// addPrefixSets adds a set for each family.
func addPrefixSets(conn *nftables.Conn, table *nftables.Table, name string, prefixes []netip.Prefix) (sets [2]*nftables.Set, err error) {
	for i, f := range families {
		sets[i] = &nftables.Set{Table: table, Name: name + f.suffix, Interval: true, KeyType: f.key}
		var own []netip.Prefix
		for _, p := range prefixes {
			if familyOf(p.Addr()) == i {
				own = append(own, p)
			}
		}
		if err := addSet(conn, sets[i], intervals(own)); err != nil {
			return sets, err
		}
	}
	return sets, nil
}

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

// ground is what the rules of this instance keep all sandboxes to.
func (r *ruleset) ground() egress.Ground {
	g := egress.Ground{
		Sandboxes: []netip.Prefix{r.cfg.Subnet.Masked()}, Gateways: []netip.Addr{r.cfg.Gateway}, Reachable: r.cfg.Reachable,
	}
	if r.gateway6.IsValid() {
		g.Sandboxes, g.Gateways = append(g.Sandboxes, r.cfg.Subnet6.Masked()), append(g.Gateways, r.gateway6)
	}
	for _, a := range r.cfg.Resolvers {
		g.Resolvers = append(g.Resolvers, a.Unmap().WithZone(""))
	}
	return g
}

// addInput keeps sandboxes from the host: they may answer it, find their gateway's hardware
// address, and ask a resolver on it.
func (r *ruleset) addInput(conn *nftables.Conn, sets addressSets) {
	chain := r.filterChain(conn, r.inet, "input", nftables.ChainHookInput, beforeOthers)
	r.rule(conn, chain, r.from(), established(), accept())
	for i := range families {
		for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			r.rule(conn, chain, r.from(), toDNS(protocol), inSet(sets[setResolvers][i], i), accept())
		}
	}
	if r.gateway6.IsValid() {
		for _, kind := range []byte{neighbourSolicitation, neighbourAdvertisement} {
			r.rule(conn, chain, r.from(), icmp6(kind), accept())
		}
	}
	r.rule(conn, chain, r.from(), drop())
}

// addForward lets sandboxes out to public addresses, and answers back in.
func (r *ruleset) addForward(conn *nftables.Conn, sets addressSets) {
	chain := r.filterChain(conn, r.inet, "forward", nftables.ChainHookForward, beforeOthers)
	r.rule(conn, chain, r.from(), r.to(), drop())
	r.rule(conn, chain, r.to(), established(), accept())
	r.rule(conn, chain, r.to(), drop())
	if !r.gateway6.IsValid() {
		r.rule(conn, chain, r.from(), notFamily(0), drop())
	}
	for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		for i := range families {
			r.rule(conn, chain, r.from(), toDNS(protocol), inSet(sets[setResolvers][i], i), accept())
		}
		r.rule(conn, chain, r.from(), toDNS(protocol), drop())
	}
	for i := range families {
		r.rule(conn, chain, r.from(), inSet(sets[setReachable][i], i), accept())
		r.rule(conn, chain, r.from(), inSet(sets[setNotPublic][i], i), drop())
	}
}

// addTranslation has sandboxes' packets leave in the host's name.
func (r *ruleset) addTranslation(conn *nftables.Conn) {
	chain := conn.AddChain(&nftables.Chain{
		Name: "translate", Table: r.inet, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	})
	for _, p := range r.ground().Sandboxes {
		i := familyOf(p.Addr())
		f := families[i]
		r.rule(conn, chain, isFamily(i), []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.source, Len: f.size},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: f.size, Mask: prefixNet(p).Mask, Xor: make([]byte, f.size)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Addr().AsSlice()},
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: linkKey(r.cfg.Bridge)},
			&expr.Masq{},
		})
	}
}

func (r *ruleset) filterChain(conn *nftables.Conn, table *nftables.Table, name string, hook *nftables.ChainHook, priority nftables.ChainPriority) *nftables.Chain {
	return conn.AddChain(&nftables.Chain{
		Name: name, Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: hook, Priority: new(priority),
	})
}

func (r *ruleset) rule(conn *nftables.Conn, chain *nftables.Chain, parts ...[]expr.Any) {
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	conn.AddRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: all})
}

func (r *ruleset) from() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: linkKey(r.cfg.Bridge)},
	}
}

func (r *ruleset) to() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: linkKey(r.cfg.Bridge)},
	}
}

func established() []expr.Any {
	mask := binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED)
	return []expr.Any{
		&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

// inSet matches packets of a family by their destination.
func inSet(set *nftables.Set, i int) []expr.Any {
	return append(isFamily(i),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: families[i].to, Len: families[i].size},
		&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID},
	)
}

func isFamily(i int) []expr.Any { return compareFamily(expr.CmpOpEq, i) }

func notFamily(i int) []expr.Any { return compareFamily(expr.CmpOpNeq, i) }

func compareFamily(op expr.CmpOp, i int) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: op, Register: 1, Data: []byte{families[i].number}},
	}
}

// Kinds of ICMPv6 by which neighbours find each other.
const (
	neighbourSolicitation  = 135
	neighbourAdvertisement = 136
)

func icmp6(kind byte) []expr.Any {
	return append(protocol(unix.IPPROTO_ICMPV6),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Len: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{kind}},
	)
}

func protocol(number byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{number}},
	}
}

// dnsPort is where DNS is asked for.
const dnsPort = 53

// toDNS matches packets of a protocol that ask for DNS.
func toDNS(number byte) []expr.Any {
	return append(protocol(number),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(dnsPort)},
	)
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }

func drop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }
