package node

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/nftables" //nolint:depguard // the test plays another program
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/ownnet"
)

// Another program removes all rules, and then only a part of them: what a sandbox may reach is soon as before.
func TestFirewallIsRestored(t *testing.T) {
	t.Parallel()
	needRoot(t)
	need(t, "containerd")
	agentProgram(t)
	if !ownnet.Inside(t) {
		return
	}
	startInternet(t, nil)
	m := newMachine(t)
	m.cfg.Network.Resolvers = []netip.Addr{netip.MustParseAddr("9.9.9.9")}
	n, _ := m.node()
	limited, open := setNetwork(object(), closedBut("7.7.7.7")), object()
	ensure(t, n, limited)
	ensure(t, n, open)
	for i, remove := range []func(conn *nftables.Conn){
		func(conn *nftables.Conn) { conn.FlushRuleset() },
		func(conn *nftables.Conn) {
			conn.FlushTable(&nftables.Table{Name: n.cfg.Network.Table, Family: nftables.TableFamilyINet})
		},
		func(conn *nftables.Conn) {
			conn.DelTable(&nftables.Table{Name: n.cfg.Network.Table, Family: nftables.TableFamilyBridge})
		},
	} {
		conn, err := nftables.New()
		must(t, err)
		remove(conn)
		must(t, conn.Flush())
		eventually.True(t, "the rules are restored", func() bool { return testutil.ToFloat64(n.firewallLosses) >= float64(i+1) })
		if out := fetched(t, n, limited, "7.7.7.7", true); !strings.Contains(out, "hello") {
			t.Errorf("%d: what is allowed: %q", i, out)
		}
		if out := fetched(t, n, open, "8.8.8.8", true); !strings.Contains(out, "hello") {
			t.Errorf("%d: without a policy: %q", i, out)
		}
		if out := fetched(t, n, limited, "8.8.8.8", false); strings.Contains(out, "hello") {
			t.Errorf("%d: what a policy denies: %q", i, out)
		}
		if out := fetched(t, n, open, "10.1.1.1", false); strings.Contains(out, "hello") {
			t.Errorf("%d: a private address: %q", i, out)
		}
	}
}
