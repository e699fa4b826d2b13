package firewall

import (
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/match"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/nftset"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/spans"
)

// beforeOthers is where our filters hook: before the machine's own, whose accept is final
// only for themselves while our drop is final for all.
const beforeOthers = -10

// addInet adds the chains that decide where sandboxes may send to.
func (r *Rules) addInet(conn *nftables.Conn) error {
	sets, err := r.addAddressSets(conn)
	if err != nil {
		return err
	}
	senders, err := r.addSenders(conn)
	if err != nil {
		return err
	}
	r.addInput(conn, sets, senders)
	r.addForward(conn, sets, senders)
	r.addTranslation(conn)
	return nil
}

// addSenders adds the sets that count the connections of sandboxes, by family.
func (r *Rules) addSenders(conn *nftables.Conn) (senders [2]*nftables.Set, err error) {
	for i, f := range families {
		senders[i] = &nftables.Set{Table: r.inet, Name: setSenders + f.suffix, KeyType: f.key, Dynamic: true, Size: 1 << 16}
		if err := nftset.AddEmpty(conn, senders[i]); err != nil {
			return senders, err
		}
	}
	return senders, nil
}

// limitConnections drops the first packet of a connection too many.
func (r *Rules) limitConnections(conn *nftables.Conn, chain *nftables.Chain, senders [2]*nftables.Set) {
	if r.cfg.Connections == 0 {
		return
	}
	for i, set := range senders {
		r.rule(conn, chain, r.from(), match.New(), source(i), match.Over(set, r.cfg.Connections), match.Drop())
	}
}

// addressSets are the sets of destinations, each by family.
type addressSets map[string][2]*nftables.Set

func (r *Rules) addAddressSets(conn *nftables.Conn) (addressSets, error) {
	host := r.hostRules()
	var resolvers []netip.Prefix
	for _, a := range slices.Concat(host.Gateways, host.Resolvers) {
		resolvers = append(resolvers, netip.PrefixFrom(a, a.BitLen()))
	}
	sets := addressSets{}
	for name, prefixes := range map[string][]netip.Prefix{
		setNotPublic: egress.NotPublic(), setReachable: host.Reachable, setResolvers: resolvers,
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
		if err := nftset.Add(conn, sets[i], spans.Intervals(own)); err != nil {
			return sets, err
		}
	}
	return sets, nil
}

// hostRules returns the limits of all sandboxes of the instance.
func (r *Rules) hostRules() egress.HostRules {
	g := egress.HostRules{
		Sandboxes: []netip.Prefix{r.cfg.Subnet.Masked()}, Gateways: []netip.Addr{r.cfg.Gateway}, Reachable: r.cfg.Reachable,
	}
	if r.cfg.Gateway6.IsValid() {
		g.Sandboxes, g.Gateways = append(g.Sandboxes, r.cfg.Subnet6.Masked()), append(g.Gateways, r.cfg.Gateway6)
	}
	for _, a := range r.cfg.Resolvers {
		g.Resolvers = append(g.Resolvers, a.Unmap().WithZone(""))
	}
	return g
}

// addInput keeps sandboxes from the host: they may answer it, find their gateway's hardware
// address, and ask a resolver on it.
func (r *Rules) addInput(conn *nftables.Conn, sets addressSets, senders [2]*nftables.Set) {
	chain := r.filterChain(conn, r.inet, "input", nftables.ChainHookInput, beforeOthers)
	r.limitConnections(conn, chain, senders)
	r.rule(conn, chain, r.from(), match.Established(), match.Accept())
	for i := range families {
		for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			r.rule(conn, chain, r.from(), match.ToDNS(protocol), inSet(sets[setResolvers][i], i), match.Accept())
		}
	}
	if r.cfg.Gateway6.IsValid() {
		for _, kind := range []byte{match.NeighbourSolicitation, match.NeighbourAdvertisement} {
			r.rule(conn, chain, r.from(), match.ICMP6(kind), match.Accept())
		}
	}
	r.rule(conn, chain, r.from(), match.Drop())
}

// addForward lets sandboxes out to public addresses, and answers back in.
func (r *Rules) addForward(conn *nftables.Conn, sets addressSets, senders [2]*nftables.Set) {
	chain := r.filterChain(conn, r.inet, "forward", nftables.ChainHookForward, beforeOthers)
	r.limitConnections(conn, chain, senders)
	r.rule(conn, chain, r.from(), r.to(), match.Drop())
	r.rule(conn, chain, r.to(), match.Established(), match.Accept())
	r.rule(conn, chain, r.to(), match.Drop())
	if !r.cfg.Gateway6.IsValid() {
		r.rule(conn, chain, r.from(), notFamily(0), match.Drop())
	}
	for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		for i := range families {
			r.rule(conn, chain, r.from(), match.ToDNS(protocol), inSet(sets[setResolvers][i], i), match.Accept())
		}
		r.rule(conn, chain, r.from(), match.ToDNS(protocol), match.Drop())
	}
	for i := range families {
		r.rule(conn, chain, r.from(), inSet(sets[setReachable][i], i), match.Accept())
		r.rule(conn, chain, r.from(), inSet(sets[setNotPublic][i], i), match.Drop())
	}
}

// addTranslation has sandboxes' packets leave in the host's name.
func (r *Rules) addTranslation(conn *nftables.Conn) {
	chain := conn.AddChain(&nftables.Chain{
		Name: "translate", Table: r.inet, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	})
	for _, p := range r.hostRules().Sandboxes {
		i := familyOf(p.Addr())
		f := families[i]
		r.rule(conn, chain, source(i), []expr.Any{
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: f.size, Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen()), Xor: make([]byte, f.size)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Addr().AsSlice()},
		}, r.onBridge(expr.MetaKeyOIFNAME, expr.CmpOpNeq), []expr.Any{&expr.Masq{}})
	}
}

// addEgress adds the chains that all sandboxes share, replacing those that are there, and
// leaves all else as it is.
func (r *Rules) addEgress(conn *nftables.Conn) error {
	e := r.egress
	conn.AddTable(e.table)
	for i := range families {
		for _, set := range []*nftables.Set{e.policies[i], e.askers[i]} {
			if err := nftset.AddEmpty(conn, set); err != nil {
				return err
			}
		}
	}
	refuse := conn.AddChain(&nftables.Chain{Name: chainRefuse, Table: e.table})
	conn.FlushChain(refuse)
	r.rule(conn, refuse, match.Protocol(unix.IPPROTO_TCP), []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}})
	r.rule(conn, refuse, []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED}})

	forward := r.filterChain(conn, e.table, "forward", nftables.ChainHookForward, beforeOthers)
	conn.FlushChain(forward)
	resolve := conn.AddChain(&nftables.Chain{
		Name: "resolve", Table: e.table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPrerouting, Priority: new(*nftables.ChainPriorityNATDest + beforeOthers),
	})
	conn.FlushChain(resolve)
	for i, gateway := range [2]netip.Addr{r.cfg.Gateway, r.cfg.Gateway6} {
		if !gateway.IsValid() {
			continue
		}
		r.rule(conn, forward, r.from(), source(i), []expr.Any{
			&expr.Lookup{SourceRegister: 1, SetName: e.policies[i].Name, SetID: e.policies[i].ID, IsDestRegSet: true},
		})
		for _, number := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			r.rule(conn, resolve, r.from(), source(i), []expr.Any{
				&expr.Lookup{SourceRegister: 1, SetName: e.askers[i].Name, SetID: e.askers[i].ID},
			}, match.ToDNS(number), []expr.Any{
				&expr.Immediate{Register: 1, Data: gateway.AsSlice()},
				&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(families[i].number), RegAddrMin: 1},
			})
		}
	}
	return nil
}

// source loads the address that a packet of a family comes from.
func source(i int) []expr.Any {
	return append(isFamily(i),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: families[i].source, Len: families[i].size})
}
