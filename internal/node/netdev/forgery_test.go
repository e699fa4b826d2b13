package netdev

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// rawSocket sends any frame and receives all, as a sandbox with raw sockets can.
type rawSocket struct {
	t     *testing.T
	fd    int
	index int
}

func newRawSocket(t *testing.T, path string) *rawSocket {
	t.Helper()
	s := &rawSocket{t: t}
	must(t, inside(t, path, func() error {
		link, err := net.InterfaceByName(peerName)
		if err != nil {
			return err
		}
		s.index = link.Index
		s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(bigEndian(unix.ETH_P_ALL)))
		return err
	}))
	t.Cleanup(func() { _ = unix.Close(s.fd) })
	return s
}

func bigEndian(v uint16) uint16 { return v<<8 | v>>8 }

func (s *rawSocket) send(frame []byte) {
	s.t.Helper()
	must(s.t, unix.Sendto(s.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: s.index, Protocol: bigEndian(unix.ETH_P_ALL)}))
}

// until reads frames until one that contains the marker, and returns those before it.
func (s *rawSocket) until(marker string) (frames [][]byte) {
	s.t.Helper()
	must(s.t, unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(soon / time.Second)}))
	for {
		b := make([]byte, 2048)
		size, _, err := unix.Recvfrom(s.fd, b, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		must(s.t, err)
		if bytes.Contains(b[:size], []byte(marker)) {
			return frames
		}
		frames = append(frames, b[:size])
	}
}

func ethernet(to, from net.HardwareAddr, etherType uint16, payload []byte) []byte {
	frame := append(append([]byte{}, to...), from...)
	return append(binary.BigEndian.AppendUint16(frame, etherType), payload...)
}

func sum16(parts ...[]byte) uint16 {
	var sum uint32
	for _, p := range parts {
		for i := 0; i < len(p); i += 2 {
			sum += uint32(p[i]) << 8
			if i+1 < len(p) {
				sum += uint32(p[i+1])
			}
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// packet is an IP packet with a payload, whose protocol has its checksum at an offset.
func packet(from, to netip.Addr, protocol byte, payload []byte, checksum int) []byte {
	var length [4]byte
	binary.BigEndian.PutUint32(length[:], uint32(len(payload)))
	binary.BigEndian.PutUint16(payload[checksum:], sum16(from.AsSlice(), to.AsSlice(), length[:], []byte{0, protocol}, payload))
	if from.Is6() {
		header := []byte{0x60, 0, 0, 0, length[2], length[3], protocol, 255}
		return append(append(append(header, from.AsSlice()...), to.AsSlice()...), payload...)
	}
	header := make([]byte, 20)
	header[0], header[8], header[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(header[2:], uint16(20+len(payload)))
	copy(header[12:], from.AsSlice())
	copy(header[16:], to.AsSlice())
	binary.BigEndian.PutUint16(header[10:], sum16(header))
	return append(header, payload...)
}

func datagram(from, to netip.Addr, text string) []byte {
	udp := make([]byte, 8, 8+len(text))
	binary.BigEndian.PutUint16(udp, 4000)
	binary.BigEndian.PutUint16(udp[2:], 53)
	binary.BigEndian.PutUint16(udp[4:], uint16(8+len(text)))
	return packet(from, to, unix.IPPROTO_UDP, append(udp, text...), 6)
}

func etherTypeOf(a netip.Addr) uint16 {
	if a.Is4() {
		return unix.ETH_P_IP
	}
	return unix.ETH_P_IPV6
}

// arpRequest requests an address in another sender's name; the receiver then caches that sender.
func arpRequest(claimed net.HardwareAddr, sender, target netip.Addr) []byte {
	arp := append([]byte{0, 1, 8, 0, 6, 4, 0, 1}, claimed...)
	arp = append(append(arp, sender.AsSlice()...), make([]byte, 6)...)
	return append(arp, target.AsSlice()...)
}

// advertisement announces that an address is behind a hardware address, and overrides caches.
func advertisement(from, to, target netip.Addr, mac net.HardwareAddr) []byte {
	icmp := append([]byte{136, 0, 0, 0, 0x60, 0, 0, 0}, target.AsSlice()...)
	icmp = append(append(icmp, 2, 1), mac...)
	return packet(from, to, unix.IPPROTO_ICMPV6, icmp, 2)
}

// receiver is a listener on the host, and what it received.
type receiver struct {
	t        *testing.T
	c        net.PacketConn
	repeated string // sent repeatedly, so copies may arrive late
}

func newReceiver(t *testing.T, a netip.Addr) *receiver {
	t.Helper()
	c, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", netip.AddrPortFrom(a, 53).String())
	must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return &receiver{t: t, c: c}
}

// until reads until a text arrives, and returns the texts before it except the repeated one.
func (h *receiver) until(text string) (before []string) {
	h.t.Helper()
	must(h.t, h.c.SetReadDeadline(time.Now().Add(soon)))
	for {
		b := make([]byte, 100)
		size, _, err := h.c.ReadFrom(b)
		must(h.t, err)
		if string(b[:size]) == text {
			return before
		}
		if string(b[:size]) != h.repeated {
			before = append(before, string(b[:size]))
		}
	}
}

// receives repeats a call until its text arrives: a new port carries nothing until the kernel has
// noticed that it is up.
func (h *receiver) receives(text string, call func()) {
	h.t.Helper()
	h.repeated = text
	b := make([]byte, 100)
	eventually.True(h.t, text, func() bool {
		call()
		must(h.t, h.c.SetReadDeadline(time.Now().Add(never)))
		size, _, err := h.c.ReadFrom(b)
		return err == nil && string(b[:size]) == text
	})
}

// forgeryNetwork is a network with a thief that has raw sockets, and a victim beside it.
func forgeryNetwork(t *testing.T) (n *Network, thief, victim Endpoint, raw *rawSocket) {
	t.Helper()
	n = testNetwork(t, withSubnet6, func(c *Config) {
		c.Resolvers = []netip.Addr{c.Subnet.Masked().Addr().Next(), c.Subnet6.Masked().Addr().Next()}
	})
	thief, victim = endpoint6(n, 1), endpoint6(n, 2)
	for _, ep := range []Endpoint{thief, victim} {
		_, err := n.Attach(t.Context(), ep)
		must(t, err)
	}
	return n, thief, victim, newRawSocket(t, n.NetnsPath(thief.ID))
}

// awaitPort waits until a sandbox's frames leave its port.
func awaitPort(t *testing.T, n *Network, ep Endpoint, raw *rawSocket) {
	t.Helper()
	h := newReceiver(t, n.Gateway())
	h.receives("hello", func() {
		raw.send(ethernet(MACOf(n.Gateway()), MACOf(ep.Address), unix.ETH_P_IP, datagram(ep.Address, n.Gateway(), "hello")))
	})
	must(t, h.c.Close())
}

// Packets with forged addresses of a neighbour are dropped, and the neighbour's traffic is
// unaffected.
func TestForgedPacketsAreDropped(t *testing.T) {
	n, thief, victim, raw := forgeryNetwork(t)
	own, other, gateway := MACOf(thief.Address), MACOf(victim.Address), MACOf(n.Gateway())
	for _, family := range []struct{ own, other, gateway netip.Addr }{
		{thief.Address, victim.Address, n.Gateway()},
		{thief.Address6, victim.Address6, n.Gateway6()},
	} {
		h := newReceiver(t, family.gateway)
		send := func(mac net.HardwareAddr, from netip.Addr, text string) {
			raw.send(ethernet(gateway, mac, etherTypeOf(from), datagram(from, family.gateway, text)))
		}
		h.receives("first", func() { send(own, family.own, "first") })
		send(other, family.other, "both forged")
		send(own, family.other, "address forged")
		send(other, family.own, "hardware address forged")
		send(own, family.own, "last")
		for _, text := range h.until("last") {
			t.Errorf("received from %s: %s", family.own, text)
		}
	}
	ports, err := n.portsByMAC(n.bridgeLink().Attrs().Index)
	must(t, err)
	if got := ports[other.String()]; got != n.HostLink(victim.ID) {
		t.Errorf("the neighbour is behind port %q now, want %s", got, n.HostLink(victim.ID))
	}
}

// Frames to another sandbox's hardware address, or to all, do not arrive.
func TestFramesToNeighboursAreDropped(t *testing.T) {
	n, thief, victim, raw := forgeryNetwork(t)
	seen := newRawSocket(t, n.NetnsPath(victim.ID))
	own := MACOf(thief.Address)
	awaitPort(t, n, thief, raw)
	awaitPort(t, n, victim, seen)
	for _, to := range []net.HardwareAddr{MACOf(victim.Address), {255, 255, 255, 255, 255, 255}, {0x33, 0x33, 0, 0, 0, 1}} {
		raw.send(ethernet(to, own, unix.ETH_P_IP, datagram(thief.Address, victim.Address, "straight")))
		raw.send(ethernet(to, own, unix.ETH_P_IPV6, datagram(thief.Address6, victim.Address6, "straight")))
		raw.send(ethernet(to, own, unix.ETH_P_ARP, arpRequest(own, thief.Address, victim.Address)))
	}
	c, err := (&net.Dialer{}).DialContext(t.Context(), "udp", netip.AddrPortFrom(victim.Address, 9).String())
	must(t, err)
	defer func() { _ = c.Close() }()
	_, err = c.Write([]byte("the end"))
	must(t, err)
	for _, frame := range seen.until("the end") {
		if bytes.Equal(frame[6:12], own) {
			t.Errorf("a frame of the neighbour's arrived: % x", frame)
		}
	}
}

// A sandbox cannot claim other addresses inside its own packets.
func TestClaimsOfOtherAddressesAreIgnored(t *testing.T) {
	n, thief, _, raw := forgeryNetwork(t)
	own, gateway := MACOf(thief.Address), MACOf(n.Gateway())
	known, wrong := net.HardwareAddr{2, 0, 0, 0, 0, 7}, net.HardwareAddr{2, 0, 0, 0, 0, 9}
	absent := endpoint6(n, 3)
	awaitPort(t, n, thief, raw)
	for name, c := range map[string]struct {
		address netip.Addr
		frame   []byte
	}{
		"ARP in another's name": {absent.Address, ethernet(gateway, own, unix.ETH_P_ARP, arpRequest(own, absent.Address, n.Gateway()))},
		"ARP with another's hardware address": {
			thief.Address, ethernet(gateway, own, unix.ETH_P_ARP, arpRequest(wrong, thief.Address, n.Gateway())),
		},
		"advertisement of another": {
			absent.Address6, ethernet(gateway, own, unix.ETH_P_IPV6, advertisement(thief.Address6, n.Gateway6(), absent.Address6, own)),
		},
		"advertisement in another's name": {
			absent.Address6, ethernet(gateway, own, unix.ETH_P_IPV6, advertisement(absent.Address6, n.Gateway6(), absent.Address6, own)),
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newReceiver(t, n.Gateway6())
			// An entry that received packets may change.
			must(t, n.host.NeighSet(&netlink.Neigh{
				LinkIndex: n.bridgeLink().Attrs().Index, State: netlink.NUD_STALE, IP: c.address.AsSlice(), HardwareAddr: known,
			}))
			raw.send(c.frame)
			raw.send(ethernet(gateway, own, unix.ETH_P_IPV6, datagram(thief.Address6, n.Gateway6(), "end")))
			h.until("end")
			entry, err := getNeigh(neighbourRequest(n.bridgeLink(), c.address))
			must(t, err)
			if entry == nil || !bytes.Equal(entry.HardwareAddr, known) {
				t.Errorf("the host believes that %s is at %v", c.address, entry)
			}
		})
	}
}
