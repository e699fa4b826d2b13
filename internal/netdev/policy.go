package netdev

import (
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
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

func (r *ruleset) addAddressSets(conn *nftables.Conn) (map[string]*nftables.Set, error) {
	resolvers := make([]netip.Prefix, 0, len(r.cfg.Resolvers))
	for _, a := range r.cfg.Resolvers {
		if a.Unmap().Is4() {
			resolvers = append(resolvers, netip.PrefixFrom(a.Unmap(), 32))
		}
	}
	sets := map[string]*nftables.Set{}
	for name, prefixes := range map[string][]netip.Prefix{
		setNotPublic: notPublic, setReachable: r.cfg.Reachable, setResolvers: resolvers,
	} {
		set := &nftables.Set{Table: r.inet, Name: name, Interval: true, KeyType: nftables.TypeIPAddr}
		if err := conn.AddSet(set, intervals(prefixes)); err != nil {
			return nil, fmt.Errorf("add set %s: %w", name, err)
		}
		sets[name] = set
	}
	return sets, nil
}

// intervals writes prefixes as the half-open intervals that the kernel wants. One that
// reaches the end of the address space has no end.
func intervals(prefixes []netip.Prefix) (elements []nftables.SetElement) {
	for _, p := range prefixes {
		first := p.Masked().Addr()
		elements = append(elements, nftables.SetElement{Key: first.AsSlice()})
		a := first.As4()
		size := uint64(1) << (32 - p.Bits())
		end := uint64(binaryutil.BigEndian.Uint32(a[:])) + size
		if end <= 0xffffffff {
			elements = append(elements, nftables.SetElement{Key: binaryutil.BigEndian.PutUint32(uint32(end)), IntervalEnd: true})
		}
	}
	return elements
}

// addInput keeps sandboxes from the host: they may answer it, and ask a resolver on it.
func (r *ruleset) addInput(conn *nftables.Conn, sets map[string]*nftables.Set) {
	chain := r.filterChain(conn, "input", nftables.ChainHookInput)
	r.rule(conn, chain, r.from(), established(), accept())
	for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		r.rule(conn, chain, r.from(), toPort(protocol, 53), inSet(sets[setResolvers]), accept())
	}
	r.rule(conn, chain, r.from(), drop())
}

// addForward lets sandboxes out to public addresses, and answers back in.
func (r *ruleset) addForward(conn *nftables.Conn, sets map[string]*nftables.Set) {
	chain := r.filterChain(conn, "forward", nftables.ChainHookForward)
	r.rule(conn, chain, r.from(), r.to(), drop())
	r.rule(conn, chain, r.to(), established(), accept())
	r.rule(conn, chain, r.to(), drop())
	for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		r.rule(conn, chain, r.from(), toPort(protocol, 53), inSet(sets[setResolvers]), accept())
		r.rule(conn, chain, r.from(), toPort(protocol, 53), drop())
	}
	r.rule(conn, chain, r.from(), inSet(sets[setReachable]), accept())
	r.rule(conn, chain, r.from(), inSet(sets[setNotPublic]), drop())
	r.rule(conn, chain, r.from(), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{unix.NFPROTO_IPV4}},
	}, drop())
}

// addTranslation has sandboxes' packets leave in the host's name.
func (r *ruleset) addTranslation(conn *nftables.Conn) {
	chain := conn.AddChain(&nftables.Chain{
		Name: "translate", Table: r.inet, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	})
	mask := prefixNet(r.cfg.Subnet).Mask
	r.rule(conn, chain, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.NFPROTO_IPV4}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: r.cfg.Subnet.Masked().Addr().AsSlice()},
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: linkKey(r.cfg.Bridge)},
		&expr.Masq{},
	})
}

func (r *ruleset) filterChain(conn *nftables.Conn, name string, hook *nftables.ChainHook) *nftables.Chain {
	return conn.AddChain(&nftables.Chain{
		Name: name, Table: r.inet, Type: nftables.ChainTypeFilter,
		Hooknum: hook, Priority: nftables.ChainPriorityRef(beforeOthers),
	})
}

func (r *ruleset) rule(conn *nftables.Conn, chain *nftables.Chain, parts ...[]expr.Any) {
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	conn.AddRule(&nftables.Rule{Table: r.inet, Chain: chain, Exprs: all})
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

// inSet matches IPv4 packets by their destination.
func inSet(set *nftables.Set) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.NFPROTO_IPV4}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
		&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID},
	}
}

func toPort(protocol byte, port uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocol}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(port)},
	}
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }

func drop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }
