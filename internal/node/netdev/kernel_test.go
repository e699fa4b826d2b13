package netdev

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

func egressSet(n *Network, name string) *nftables.Set {
	return &nftables.Set{Table: &nftables.Table{Name: n.cfg.Table + "-egress", Family: nftables.TableFamilyINet}, Name: name}
}

func pinSet(n *Network, id string, family netip.Addr) *nftables.Set {
	set := egressSet(n, id+".pins")
	if family.Is6() {
		set.Name += "6"
	}
	return set
}

func elementsOf(t *testing.T, set *nftables.Set) []nftables.SetElement {
	t.Helper()
	conn, err := nftables.New()
	must(t, err)
	known, err := conn.GetSetByName(set.Table, set.Name)
	must(t, err)
	elements, err := conn.GetSetElements(known)
	must(t, err)
	return elements
}

// portKeysOf reads the addresses that a link may send from; an empty name means any link.
func portKeysOf(t *testing.T, n *Network, link string) (keys [][]byte) {
	t.Helper()
	table := &nftables.Table{Name: n.cfg.Table, Family: nftables.TableFamilyBridge}
	prefix := make([]byte, unix.IFNAMSIZ)
	copy(prefix, link)
	for _, name := range []string{"ports", "ports6"} {
		for _, e := range elementsOf(t, &nftables.Set{Table: table, Name: name}) {
			if link == "" || bytes.HasPrefix(e.Key, prefix) {
				keys = append(keys, e.Key)
			}
		}
	}
	return keys
}
