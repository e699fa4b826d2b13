package firewall

import (
	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

func (r *Rules) filterChain(conn *nftables.Conn, table *nftables.Table, name string, hook *nftables.ChainHook, priority nftables.ChainPriority) *nftables.Chain {
	return conn.AddChain(&nftables.Chain{
		Name: name, Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: hook, Priority: new(priority),
	})
}

func (r *Rules) rule(conn *nftables.Conn, chain *nftables.Chain, parts ...[]expr.Any) {
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	conn.AddRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: all})
}

func (r *Rules) from() []expr.Any { return r.onBridge(expr.MetaKeyIIFNAME, expr.CmpOpEq) }

func (r *Rules) to() []expr.Any { return r.onBridge(expr.MetaKeyOIFNAME, expr.CmpOpEq) }

func (r *Rules) onBridge(link expr.MetaKey, op expr.CmpOp) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: link, Register: 1},
		&expr.Cmp{Op: op, Register: 1, Data: linkKey(r.cfg.Bridge)},
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
