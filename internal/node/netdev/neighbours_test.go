package netdev

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/vishvananda/netlink"
)

func inUse(t *testing.T, n *Network, a netip.Addr) string {
	t.Helper()
	by, err := n.InUse(t.Context(), a)
	must(t, err)
	return by
}

// usedBy checks the owner of addresses, in single queries and, unless the entries were flushed, in
// the full list.
func usedBy(t *testing.T, n *Network, by, state string, addrs ...netip.Addr) {
	t.Helper()
	all, err := n.Neighbours(t.Context())
	must(t, err)
	for i, a := range addrs {
		if got := inUse(t, n, a); got != by {
			t.Errorf("%s is in use by %q, want %q", a, got, by)
		}
		if state == "" {
			continue
		}
		want := Neighbour{Address: a, MAC: MACOf(addrs[0]), State: state, Port: by}
		if len(all) != len(addrs) || !reflect.DeepEqual(all[i], want) {
			t.Errorf("neighbours %+v, want %+v", all, want)
		}
	}
	if state == "" && len(all) != 0 {
		t.Errorf("neighbours %+v, want none", all)
	}
}

func TestNeighboursAndInUse(t *testing.T) {
	n := testNetwork(t, withSubnet6)
	ep := endpoint6(n, 1)
	usedBy(t, n, "", "", ep.Address, ep.Address6)
	at, err := n.Attach(t.Context(), ep)
	must(t, err)
	usedBy(t, n, at.HostLink, "permanent", ep.Address, ep.Address6)

	must(t, n.removeNeighbour(ep.Address, ep.Address)) // as after a flush
	must(t, n.removeNeighbour(ep.Address6, ep.Address))
	usedBy(t, n, at.HostLink, "", ep.Address, ep.Address6)
	must(t, n.Adopt(t.Context(), ep))
	usedBy(t, n, at.HostLink, "permanent", ep.Address, ep.Address6)

	must(t, n.removeLink(at.HostLink)) // removed without Detach: our entries stay
	usedBy(t, n, "", "permanent", ep.Address, ep.Address6)
	must(t, n.Detach(t.Context(), ep))
	usedBy(t, n, "", "", ep.Address, ep.Address6)
}

// Another program adds a host to the bridge with an address of ours.
func TestInUseByUnknownHost(t *testing.T) {
	n := testNetwork(t)
	a := endpoint(n, 5).Address
	name := "x" + n.cfg.Bridge
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = name, n.bridgeLink().Attrs().Index
	foreign, ns, err := n.newNamespace()
	must(t, err)
	defer foreign.Close()
	defer func() { _ = ns.Close() }()
	must(t, n.host.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peerName, PeerNamespace: netlink.NsFd(int(ns.Fd()))}))
	t.Cleanup(func() { _ = n.removeLink(name) })
	host, err := n.host.LinkByName(name)
	must(t, err)
	must(t, n.host.LinkSetUp(host))
	link, err := foreign.LinkByName(peerName)
	must(t, err)
	must(t, foreign.AddrAdd(link, &netlink.Addr{IPNet: prefixNet(netip.PrefixFrom(a, 24))}))
	must(t, foreign.LinkSetUp(link))
	must(t, inNamespace(ns, func() error { return listen(t, "0.0.0.0:8080") }))
	if err := dial(t, a.String()+":8080", soon); err != nil { // adds a neighbour entry
		t.Fatal(err)
	}
	if by := inUse(t, n, a); by != name {
		t.Errorf("in use by %q, want %s", by, name)
	}
	must(t, n.removeLink(name))
	if by := inUse(t, n, a); by != "" {
		t.Errorf("in use by %q, which was removed", by)
	}
}
