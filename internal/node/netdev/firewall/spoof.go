package firewall

import (
	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/match"
)

// Where messages that speak for an address have it: ARP has the sender's hardware address before
// its protocol address, an advertisement of IPv6 has the target.
const (
	arpSenderHardware   = 8
	advertisementTarget = 8
)

// addDiscovery keeps ports from claiming, in packets that they send in their own name, addresses
// that are not their own. The input chain prevents that a sandbox is a router.
func (r *Rules) addDiscovery(conn *nftables.Conn, chain *nftables.Chain, ours []expr.Any) {
	unlessOwn := func(family int, message []expr.Any, mac, address *expr.Payload) {
		mac.DestRegister, mac.Len = regMAC, 6
		address.DestRegister, address.Len = regIP, families[family].size
		r.rule(conn, chain, ours, message, []expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: regLink}, mac, address,
			&expr.Lookup{SourceRegister: regLink, SetName: r.ports[family].Name, SetID: r.ports[family].ID, Invert: true},
		}, match.Drop())
	}
	unlessOwn(
		0, ofEtherType(unix.ETH_P_ARP),
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: arpSenderHardware},
		&expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: arpSender},
	)
	unlessOwn(
		1, append(ofEtherType(unix.ETH_P_IPV6), match.ICMP6(match.NeighbourAdvertisement)...),
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

// Registers that the parts of a port's key are loaded into, one after the other.
const (
	regLink = unix.NFT_REG32_00
	regMAC  = unix.NFT_REG32_04
	regIP   = unix.NFT_REG32_06
)

// arpSender is where ARP has the sender's protocol address.
const arpSender = 14

// addBridgeChain lets a port of ours send IPv4, ARP and, where there is any, IPv6 in its own
// name only.
func (r *Rules) addBridgeChain(conn *nftables.Conn) {
	chain := conn.AddChain(&nftables.Chain{
		Name: "spoof", Table: r.bridge, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw,
	})
	ours := []expr.Any{
		// By the beginning of its name, so that a port is shut before it is known; not every
		// kernel can compare the name of the port's bridge.
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte(r.cfg.PortPrefix)},
	}
	r.addDiscovery(conn, chain, ours)
	permit := func(etherType uint16, i int, offset uint32) {
		r.rule(conn, chain, ours, ofEtherType(etherType), []expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: regLink},
			&expr.Payload{DestRegister: regMAC, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6},
			&expr.Payload{DestRegister: regIP, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: families[i].size},
			&expr.Lookup{SourceRegister: regLink, SetName: r.ports[i].Name, SetID: r.ports[i].ID},
		}, match.Accept())
	}
	permit(unix.ETH_P_ARP, 0, arpSender)
	for i, f := range families {
		if i == 0 || r.cfg.Gateway6.IsValid() {
			permit(f.etherType, i, f.source)
		}
	}
	r.rule(conn, chain, ours, match.Drop())
}
