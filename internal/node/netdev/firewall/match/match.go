// Package match has the expressions of nftables rules that need no set or chain.
package match

import (
	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/egress"
)

// Established matches packets of known connections.
func Established() []expr.Any { return inState(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED) }

// New matches the first packets of connections.
func New() []expr.Any { return inState(expr.CtStateBitNEW) }

// inState matches packets of connections that are in one of the states.
func inState(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

// Over matches where the address in register 1 has more connections than most. The set has an element for each address.
func Over(set *nftables.Set, most uint32) []expr.Any {
	return []expr.Any{&expr.Dynset{
		SrcRegKey: 1, SetName: set.Name, SetID: set.ID, Operation: unix.NFT_DYNSET_OP_ADD,
		Exprs: []expr.Any{&expr.Connlimit{Count: most, Flags: expr.NFT_CONNLIMIT_F_INV}},
	}}
}

// Types of ICMPv6 messages of neighbour discovery (RFC 4861, 4).
const (
	NeighbourSolicitation  = 135
	NeighbourAdvertisement = 136
)

// ICMP6 matches ICMPv6 messages of a type.
func ICMP6(kind byte) []expr.Any {
	return append(Protocol(unix.IPPROTO_ICMPV6),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Len: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{kind}},
	)
}

// Protocol matches packets of a transport protocol.
func Protocol(number byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{number}},
	}
}

// DNSPort is the port of DNS servers.
const DNSPort = 53

// ToDNS matches packets of a Protocol to DNS servers.
func ToDNS(number byte) []expr.Any {
	return append(Protocol(number),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(DNSPort)},
	)
}

// Accept is a rule's end.
func Accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }

// Drop is a rule's end.
func Drop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

// ToPorts matches packets to the ports of a Protocol.
func ToPorts(p egress.Ports) []expr.Any {
	numbers := map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}
	match := Protocol(numbers[p.Protocol])
	if p.First == 0 { // all of them
		return match
	}
	return append(match,
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Range{
			Op: expr.CmpOpEq, Register: 1,
			FromData: binaryutil.BigEndian.PutUint16(p.First), ToData: binaryutil.BigEndian.PutUint16(p.Last),
		})
}
