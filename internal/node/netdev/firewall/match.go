package firewall

import (
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
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
