package netdev

import (
	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Where messages that speak for an address have it: ARP has the sender's hardware address before
// its protocol address, an advertisement of IPv6 has the target.
const (
	arpSenderHardware   = 8
	advertisementTarget = 8
)

// addDiscovery keeps ports from claiming, in packets that they send in their own name, addresses
// that are not their own. That nobody may be a router is the input chain's matter.
func (r *ruleset) addDiscovery(conn *nftables.Conn, chain *nftables.Chain, ours []expr.Any) {
	unlessOwn := func(family int, message []expr.Any, mac, address *expr.Payload) {
		mac.DestRegister, mac.Len = regMAC, 6
		address.DestRegister, address.Len = regIP, families[family].size
		exprs := append(append([]expr.Any{}, ours...), message...)
		exprs = append(exprs,
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: regLink}, mac, address,
			&expr.Lookup{SourceRegister: regLink, SetName: r.ports[family].Name, SetID: r.ports[family].ID, Invert: true},
			&expr.Verdict{Kind: expr.VerdictDrop},
		)
		conn.AddRule(&nftables.Rule{Table: r.bridge, Chain: chain, Exprs: exprs})
	}
	unlessOwn(
		0, ofEtherType(unix.ETH_P_ARP),
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: arpSenderHardware},
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: arpSender},
	)
	unlessOwn(
		1, append(ofEtherType(unix.ETH_P_IPV6), icmp6(neighbourAdvertisement)...),
		&expr.Payload{Base: expr.PayloadBaseLLHeader, Offset: 6},
		&expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: advertisementTarget},
	)
}

func ofEtherType(etherType uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(etherType)},
	}
}
