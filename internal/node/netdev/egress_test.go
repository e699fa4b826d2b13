package netdev

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/testkit/ownnet"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// internet is a namespace that has all public addresses.
type internet struct{ path string }

func newInternet(t *testing.T) *internet {
	t.Helper()
	w := &internet{path: filepath.Join(t.TempDir(), "internet")}
	must(t, os.WriteFile(w.path, nil, 0o600))
	must(t, onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", w.path, "", unix.MS_BIND, "")
	}))
	t.Cleanup(func() { _ = unix.Unmount(w.path, unix.MNT_DETACH) })
	ns, err := os.Open(w.path)
	must(t, err)
	defer func() { _ = ns.Close() }()
	must(t, setUp("lo"))
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up0"}, PeerName: "net0", PeerNamespace: netlink.NsFd(int(ns.Fd()))}))
	must(t, inside(t, w.path, func() error {
		if err := errors.Join(setUp("lo"), setUp("net0", "11.0.0.2/30", "2600::2/126")); err != nil {
			return err
		}
		return addAllAddresses("lo")
	}))
	must(t, setUp("up0", "11.0.0.1/30", "2600::1/126"))
	near, err := netlink.LinkByName("up0")
	must(t, err)
	for _, via := range []string{"11.0.0.2", "2600::2"} {
		must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: near.Attrs().Index, Gw: net.ParseIP(via)}))
	}
	must(t, os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0o600))
	return w
}

func setUp(name string, addresses ...string) error {
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	for _, text := range addresses {
		if err != nil {
			break
		}
		var a *netlink.Addr
		if a, err = netlink.ParseAddr(text); err == nil {
			a.Flags = unix.IFA_F_NODAD
			err = netlink.AddrAdd(l, a)
		}
	}
	if err != nil {
		return fmt.Errorf("set up %s: %w", name, err)
	}
	return nil
}

// addAllAddresses gives a link of the thread's namespace every address.
func addAllAddresses(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, all := range []string{"0.0.0.0/0", "::/0"} {
		_, dst, _ := net.ParseCIDR(all)
		err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST})
		if err != nil {
			return fmt.Errorf("route %s to %s: %w", all, name, err)
		}
	}
	return nil
}

var testReachable = []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16"), netip.MustParsePrefix("fd77::/32")}

// egressNetwork is a network with IPv6 in the test's own network namespace.
func egressNetwork(t *testing.T, change ...func(*Config)) *Network {
	t.Helper()
	return testNetwork(t, func(c *Config) {
		for _, f := range change {
			f(c)
		}
		c.NetnsDir = t.TempDir()
		c.Subnet, c.Subnet6 = netip.MustParsePrefix("10.201.0.0/24"), netip.MustParsePrefix("fd01:2:3::/64")
		c.Resolvers = []netip.Addr{netip.MustParseAddr("9.9.9.9"), netip.MustParseAddr("2620:fe::fe")}
		c.Reachable = testReachable
	})
}

func endpoint6(n *Network, i int) Endpoint {
	ep := endpoint(n, i)
	ep.Address6 = ipam.Beside(n.cfg.Subnet6, ep.Address)
	return ep
}

func attach(t *testing.T, n *Network, i int) Endpoint {
	t.Helper()
	ep := endpoint6(n, i)
	_, err := n.Attach(t.Context(), ep)
	must(t, err)
	return ep
}

func compile(t *testing.T, from *agents.EgressPolicy) egress.Policy {
	t.Helper()
	p, err := egress.Compile(from)
	must(t, err)
	return p
}

func closedBut(allow ...string) *agents.EgressPolicy {
	no := false
	return &agents.EgressPolicy{Internet: &no, AllowOut: allow}
}

func (n *Network) try(t *testing.T, ep Endpoint, address string, limit time.Duration) error {
	t.Helper()
	return inside(t, n.NetnsPath(ep.ID), func() error {
		c, err := (&net.Dialer{Timeout: limit}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			return err
		}
		return c.Close()
	})
}

// echo is a connection that stays open; ping reports whether it still answers.
type echo struct{ net.Conn }

func (w *internet) serveEcho(t *testing.T, port int) {
	t.Helper()
	must(t, inside(t, w.path, func() error {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					b := make([]byte, 1)
					for {
						if _, err := c.Read(b); err != nil {
							_ = c.Close()
							return
						}
						_, _ = c.Write(b)
					}
				}()
			}
		}()
		return nil
	}))
}

func (n *Network) open(t *testing.T, ep Endpoint, address string) *echo {
	t.Helper()
	var c net.Conn
	must(t, inside(t, n.NetnsPath(ep.ID), func() (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		c, err = (&net.Dialer{}).DialContext(ctx, "tcp", address)
		return err
	}))
	t.Cleanup(func() { _ = c.Close() })
	return &echo{c}
}

func (e *echo) ping(limit time.Duration) error {
	if err := e.SetDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	if _, err := e.Write([]byte("x")); err != nil {
		return err
	}
	_, err := e.Read(make([]byte, 1))
	return err
}

func TestEgressChangesWhileConnectionsAreOpen(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	w, n := newInternet(t), egressNetwork(t)
	w.serveEcho(t, 80)
	a, b := attach(t, n, 1), attach(t, n, 2)
	first, second := n.open(t, a, "8.8.8.8:80"), n.open(t, a, "1.1.1.1:80")
	must(t, first.ping(soon))
	must(t, second.ping(soon))
	set := func(p *agents.EgressPolicy) {
		t.Helper()
		must(t, n.SetEgress(t.Context(), a, compile(t, p)))
	}

	set(closedBut("8.8.8.0/24"))
	if err := first.ping(soon); err != nil {
		t.Errorf("a connection that is allowed broke: %v", err)
	}
	if err := second.ping(never); err == nil {
		t.Error("a connection that is no longer allowed still works")
	}
	for range 20 { // an equivalent policy must not interrupt
		set(closedBut("8.8.8.0/24", "7.7.7.7"))
		set(closedBut("8.8.8.8"))
	}
	if err := first.ping(soon); err != nil {
		t.Errorf("a connection that is allowed broke: %v", err)
	}
	n.open(t, b, "1.1.1.1:80") // other sandboxes are unaffected
	if ids, err := n.EgressRules(t.Context()); err != nil || !slices.Equal(ids, []string{a.ID}) {
		t.Errorf("EgressRules = %v, %v", ids, err)
	}
	set(nil)
	n.open(t, a, "1.1.1.1:80")
	if ids, err := n.EgressRules(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("EgressRules without a policy = %v, %v", ids, err)
	}
	// A connection opened under a policy with names is cut when that policy forbids it.
	third := n.open(t, a, "1.1.1.1:80")
	must(t, third.ping(soon))
	set(closedBut("example.com", "8.8.8.8"))
	if err := third.ping(never); err == nil {
		t.Error("a connection that a policy with names forbids still works")
	}
	if err := first.ping(soon); err != nil {
		t.Errorf("a connection that is allowed broke: %v", err)
	}
	must(t, n.Detach(t.Context(), a))
	if ids, err := n.EgressRules(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("EgressRules after Detach = %v, %v", ids, err)
	}
	leftovers(t, n)
}

// Both the networkPolicy and the sandbox's own policy must allow; rules may change under open
// connections, and another process finds them again.
func TestEgressWithNetworkPolicy(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	w, n := newInternet(t), egressNetwork(t)
	w.serveEcho(t, 80)
	w.serveEcho(t, 81)
	a := attach(t, n, 1)
	rules := func(p *agents.EgressPolicy, port int32, blocks ...string) egress.Policy {
		t.Helper()
		var rule networkingv1.NetworkPolicyEgressRule
		for _, b := range blocks {
			rule.To = append(rule.To, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: b}})
		}
		rule.Ports = []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(port))}}
		within, err := compile(t, p).Within(&agents.NetworkPolicy{Egress: []networkingv1.NetworkPolicyEgressRule{rule}})
		must(t, err)
		return within
	}
	reaches := func(n *Network, address string, want bool) {
		t.Helper()
		limit := soon
		if !want {
			limit = never
		}
		if err := n.try(t, a, address, limit); (err == nil) != want {
			t.Errorf("%s: %v, reached should be %t", address, err, want)
		}
	}
	must(t, n.SetEgress(t.Context(), a, rules(nil, 80, "8.0.0.0/8", "9.0.0.0/8")))
	reaches(n, "8.8.8.8:80", true)
	reaches(n, "8.8.8.8:81", false)
	reaches(n, "7.7.7.7:80", false)
	open := n.open(t, a, "9.1.1.1:80")
	must(t, n.SetEgress(t.Context(), a, rules(nil, 80, "8.0.0.0/8")))
	if err := open.ping(never); err == nil {
		t.Error("a connection that the rules no longer allow still works")
	}
	both := rules(closedBut("8.8.8.8", "7.7.7.7"), 80, "8.0.0.0/8")
	must(t, n.SetEgress(t.Context(), a, both))

	again, err := New(n.cfg)
	must(t, err)
	defer again.Close()
	must(t, again.Open(t.Context()))
	reaches(again, "8.8.8.8:80", true) // before it loads the policy
	must(t, again.SetEgress(t.Context(), a, both))
	for address, want := range map[string]bool{"8.8.8.8:80": true, "8.8.4.4:80": false, "7.7.7.7:80": false, "8.8.8.8:81": false} {
		reaches(again, address, want)
	}
	must(t, again.SetEgress(t.Context(), a, egress.Policy{}))
	reaches(again, "7.7.7.7:81", true)
	leftovers(t, again)
	must(t, again.SetEgress(t.Context(), a, rules(nil, 80)))
	must(t, again.Detach(t.Context(), a))
	leftovers(t, again)
}

// The kernel accepts as many entries of each kind as the API server admits.
func TestEgressTakesManyRules(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	w, n := newInternet(t), egressNetwork(t)
	w.serveEcho(t, 80)
	a := attach(t, n, 1)
	const many = 997 // with the rule, a peer and a port
	block := func(cidr string) networkingv1.NetworkPolicyPeer {
		return networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: cidr}}
	}
	web := networkingv1.NetworkPolicyPort{Port: new(intstr.FromInt32(80))}
	peers, ports := []networkingv1.NetworkPolicyPeer{}, []networkingv1.NetworkPolicyPort{web}
	holes, rules := block("0.0.0.0/0"), []networkingv1.NetworkPolicyEgressRule{}
	for i := range many {
		peers = append(peers, block(fmt.Sprintf("8.%d.%d.0/25", i/256, i%256)))
		ports = append(ports, networkingv1.NetworkPolicyPort{Port: new(intstr.FromInt32(int32(1000 + i)))})
		holes.IPBlock.Except = append(holes.IPBlock.Except, fmt.Sprintf("8.%d.%d.1/32", i/256, i%256))
		if i < many/3 {
			rules = append(rules, networkingv1.NetworkPolicyEgressRule{To: peers[i:], Ports: ports[:1]})
			rules[i].To = rules[i].To[:1]
		}
	}
	for name, tt := range map[string]struct {
		rules        []networkingv1.NetworkPolicyEgressRule
		open, closed string
	}{
		"peers":      {[]networkingv1.NetworkPolicyEgressRule{{To: peers, Ports: ports[:1]}}, "8.3.200.1:80", "8.3.200.200:80"},
		"ports":      {[]networkingv1.NetworkPolicyEgressRule{{To: peers[:1], Ports: ports}}, "8.0.0.1:80", "8.0.0.1:81"},
		"exceptions": {[]networkingv1.NetworkPolicyEgressRule{{To: []networkingv1.NetworkPolicyPeer{holes}, Ports: ports[:1]}}, "8.3.200.2:80", "8.3.200.1:80"},
		"rules":      {rules, "8.1.1.1:80", "8.1.200.1:80"},
	} {
		p, err := egress.Policy{}.Within(&agents.NetworkPolicy{Egress: tt.rules})
		must(t, err)
		must(t, n.SetEgress(t.Context(), a, p))
		if err := n.try(t, a, tt.open, soon); err != nil {
			t.Errorf("%s: %s: %v", name, tt.open, err)
		}
		if err := n.try(t, a, tt.closed, never); err == nil {
			t.Errorf("%s: %s is open", name, tt.closed)
		}
	}
	must(t, n.Detach(t.Context(), a))
	leftovers(t, n)
}

// Another program deletes a policy's objects: the next start restores them.
func TestEgressRestoredAfterFlush(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	w, n := newInternet(t), egressNetwork(t)
	w.serveEcho(t, 80)
	a := attach(t, n, 1)
	p := compile(t, closedBut("example.com", "8.8.8.8"))
	must(t, n.SetEgress(t.Context(), a, p))
	policies, askers := egressSet(n, "policies"), egressSet(n, "askers")
	for _, what := range []string{"the set", "the map", "the set", "the map", "the table"} {
		conn, err := nftables.New()
		must(t, err)
		switch what {
		case "the map":
			conn.FlushSet(policies)
		case "the set":
			conn.FlushSet(askers)
		default:
			conn.DelTable(askers.Table)
		}
		must(t, conn.Flush())
		again, err := New(n.cfg)
		must(t, err)
		must(t, again.Open(t.Context()))
		must(t, again.SetEgress(t.Context(), a, p))
		if err := again.try(t, a, "1.1.1.1:80", never); err == nil {
			t.Errorf("open after %s was flushed", what)
		}
		if err := again.try(t, a, "8.8.8.8:80", soon); err != nil {
			t.Errorf("shut after %s was flushed: %v", what, err)
		}
		if elements := elementsOf(t, askers); len(elements) != 1 {
			t.Errorf("askers after %s was flushed: %v", what, elements)
		}
		again.Close()
	}
	must(t, n.Detach(t.Context(), a)) // without knowledge of the flush
	leftovers(t, n)
}

// leftovers fails the test if anything of a single sandbox is in the egress table.
func leftovers(t *testing.T, n *Network) {
	t.Helper()
	conn, err := nftables.New()
	must(t, err)
	table := egressSet(n, "").Table
	sets, err := conn.GetSets(table)
	must(t, err)
	for _, s := range sets {
		if strings.Contains(s.Name, ".") { // begins with an ID
			t.Errorf("set %s remains", s.Name)
			continue
		}
		if left := elementsOf(t, s); len(left) > 0 {
			t.Errorf("elements of %s remain: %v", s.Name, left)
		}
	}
	chains, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	must(t, err)
	for _, c := range chains {
		if strings.Contains(c.Name, ".") && c.Table.Name == table.Name {
			t.Errorf("chain %s remains", c.Name)
		}
	}
}

func TestPinsOpenAndSurvive(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	w, n := newInternet(t), egressNetwork(t)
	w.serveEcho(t, 80)
	a := attach(t, n, 1)
	p := compile(t, closedBut("example.com", "*.other.org"))
	must(t, n.SetEgress(t.Context(), a, p))
	addrs := func(list ...string) (all []netip.Addr) {
		for _, s := range list {
			all = append(all, netip.MustParseAddr(s))
		}
		return all
	}
	pin := func(name string, keep time.Duration, list ...string) []netip.Addr {
		t.Helper()
		got, err := n.Pin(t.Context(), a.Address, name, addrs(list...), keep)
		must(t, err)
		return got
	}
	if err := n.try(t, a, "5.5.5.5:80", never); err == nil {
		t.Fatal("open without a pin")
	}
	got := pin("Example.com.", time.Minute, "5.5.5.5", "169.254.169.254", "10.201.0.1", "10.77.1.1", "2606::1", "fd01:2:3::1")
	if want := addrs("5.5.5.5", "10.77.1.1", "2606::1"); !slices.Equal(got, want) {
		t.Errorf("pinned %v, want %v", got, want)
	}
	if _, err := n.Pin(t.Context(), a.Address, "evil.com", addrs("6.6.6.6"), time.Minute); err == nil {
		t.Error("a name that is not allowed was pinned")
	}
	c := n.open(t, a, "5.5.5.5:80")
	must(t, c.ping(soon))
	pin("x.other.org", time.Minute, "5.5.5.5") // two names, one address
	pin("x.other.org", time.Minute, "5.5.5.6")

	// Another process takes over: pins are unchanged, also before it loads policies.
	again, err := New(n.cfg)
	must(t, err)
	defer again.Close()
	must(t, again.Open(t.Context()))
	must(t, c.ping(soon))
	must(t, again.open(t, a, "5.5.5.6:80").ping(soon))
	if err := again.try(t, a, "6.6.6.6:80", never); err == nil {
		t.Error("open between Open and SetEgress")
	}
	if p := again.EgressOf(a.Address); !p.UsesResolver() || p.Pins() {
		t.Errorf("policy before it is loaded: %+v, want one that denies all", p)
	}
	must(t, again.SetEgress(t.Context(), a, p))
	must(t, c.ping(soon))
	if pins := again.Pins(a.ID); len(pins) != 4 || !slices.Contains(pins[0].Names, "example.com") || time.Until(pins[0].Until) < time.Minute {
		t.Errorf("pins after a restart: %+v", pins)
	}

	wantOutlives(t, again, a, c)
	must(t, again.Detach(t.Context(), a))
	leftovers(t, again)
}

// wantOutlives requires a connection to continue after its pin, until its name is removed.
func wantOutlives(t *testing.T, again *Network, a Endpoint, c *echo) {
	t.Helper()
	gone, kept := netip.MustParseAddr("5.5.5.5"), netip.MustParseAddr("5.5.5.6")
	expirePin(t, again, a.ID, gone)
	if err := again.try(t, a, "5.5.5.5:80", never); err == nil {
		t.Error("open without a pin")
	}
	must(t, c.ping(soon))
	must(t, again.SetEgress(t.Context(), a, compile(t, closedBut("example.com", "*.other.org", "3.3.3.3"))))
	if err := c.ping(soon); err != nil {
		t.Errorf("a change that removes no name broke a connection: %v", err)
	}
	pinned := again.open(t, a, "5.5.5.6:80")
	must(t, again.SetEgress(t.Context(), a, compile(t, closedBut("*.other.org"))))
	if err := c.ping(never); err == nil {
		t.Error("a connection to a removed name still works")
	}
	must(t, pinned.ping(soon))
	if pins := again.Pins(a.ID); len(pins) != 1 || pins[0].Address != kept {
		t.Errorf("pins after a name was removed: %+v", pins)
	}
}

func expirePin(t *testing.T, n *Network, id string, a netip.Addr) {
	t.Helper()
	conn, err := nftables.New()
	must(t, err)
	must(t, conn.SetDeleteElements(pinSet(n, id, a), []nftables.SetElement{{Key: a.AsSlice()}}))
	must(t, conn.Flush())
	must(t, n.rules.Install()) // reads the pins again
}

func TestPinsAreBounded(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	n := egressNetwork(t)
	a := attach(t, n, 1)
	must(t, n.SetEgress(t.Context(), a, compile(t, closedBut("*.example.com"))))
	next := netip.MustParseAddr("20.0.0.0")
	for i := range 12 {
		var list []netip.Addr
		for range 100 {
			next = next.Next()
			list = append(list, next)
		}
		_, err := n.Pin(t.Context(), a.Address, fmt.Sprintf("h%d.example.com", i), list, time.Duration(i+1)*time.Minute)
		must(t, err)
	}
	pins := n.Pins(a.ID)
	conn, err := nftables.New()
	must(t, err)
	const maxPins = 1024
	inKernel := elementsOf(t, pinSet(n, a.ID, next))
	if len(pins) != maxPins || len(inKernel) != maxPins || pins[len(pins)-1].Address != next {
		t.Errorf("%d pins, %d in the kernel, the last %v; want %d of each, and the newest", len(pins), len(inKernel), pins[len(pins)-1], maxPins)
	}
	// Another program flushes the set: the next pin recovers.
	conn.FlushSet(pinSet(n, a.ID, next))
	must(t, conn.Flush())
	_, err = n.Pin(t.Context(), a.Address, "new.example.com", []netip.Addr{next}, time.Hour)
	must(t, err)
}

// Random policies and packets: the kernel matches Decide.
func TestKernelAgreesWithDecide(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	w, n := newInternet(t), egressNetwork(t)
	a, other := attach(t, n, 1), attach(t, n, 2)
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("BARCHAN_TEST_SEED"); text != "" {
		_, err := fmt.Sscan(text, &seed)
		must(t, err)
	}
	t.Logf("BARCHAN_TEST_SEED=%d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	seen := w.watch(t)
	sender, marker := newSender(t, n.NetnsPath(a.ID)), newSender(t, n.NetnsPath(other.ID))
	host := n.HostRules()
	host.Machine = []netip.Addr{netip.MustParseAddr("11.0.0.1"), netip.MustParseAddr("2600::1")}
	counts, bounded := map[egress.Verdict]int{}, map[egress.Verdict]int{}
	for range 80 {
		source := randomPolicy(r)
		if r.IntN(3) == 0 {
			source = nil
		}
		rules, near := randomRules(r, source)
		p, err := compile(t, source).Within(rules)
		must(t, err)
		must(t, n.SetEgress(t.Context(), a, p))
		if p.Pins() {
			for range 3 {
				_, err := n.Pin(t.Context(), a.Address, "x.example.com", []netip.Addr{randomAddress(r, source, near...)}, time.Hour)
				must(t, err)
			}
		}
		packets, pins := map[egress.Packet]egress.Decision{}, n.Pins(a.ID)
		for range 60 {
			k := randomPacket(r, source, rules != nil, near)
			if len(pins) > 0 && r.IntN(8) == 0 {
				k.Address = pins[r.IntN(len(pins))].Address
			}
			d := egress.Decide(host, p, pins, k)
			counts[d.Verdict]++
			if strings.Contains(d.Rule, "networkPolicy") {
				bounded[d.Verdict]++
			}
			packets[k] = d
		}
		wantArrivals(t, sender, marker, seen, packets, p)
	}
	t.Logf("decided: %v, of these by a networkPolicy: %v", counts, bounded)
	if bounded[egress.Allowed] < 40 || bounded[egress.Refused] < 100 {
		t.Errorf("decided by a networkPolicy: %v: too few cases", bounded)
	}
	for _, v := range []egress.Verdict{egress.Allowed, egress.Refused, egress.Resolver} {
		if counts[v] < 100 {
			t.Errorf("%d packets %s: too few cases", counts[v], v)
		}
	}
}

// randomPacket often has port 53, and one of a few others where ports matter.
func randomPacket(r *rand.Rand, p *agents.EgressPolicy, fewPorts bool, near []string) egress.Packet {
	k := egress.Packet{Address: randomAddress(r, p, near...), Port: uint16(1024 + r.IntN(60000)), Protocol: []string{"tcp", "udp"}[r.IntN(2)]}
	if r.IntN(5) == 0 {
		k.Port = 53
	}
	if !fewPorts {
		return k
	}
	if len(near) > 0 && r.IntN(2) == 0 {
		if a := randomIn(r, netip.MustParsePrefix(near[r.IntN(len(near))])); usable(a) {
			k.Address = a
		}
	}
	switch r.IntN(8) {
	case 0:
		k.Address, k.Port = netip.MustParseAddr([]string{"9.9.9.9", "2620:fe::fe"}[r.IntN(2)]), 53
	case 1, 2, 3, 4, 5:
		k.Port = uint16(1024 + r.IntN(5))
	}
	return k
}

// wantArrivals sends packets and compares the arrivals with the decisions.
func wantArrivals(t *testing.T, sender, marker *sender, seen *watcher, packets map[egress.Packet]egress.Decision, source egress.Policy) {
	t.Helper()
	left := maps.Clone(packets)
	sender.renew()
	for try := 0; try < 5 && len(left) > 0; try++ {
		for k := range left {
			sender.send(k)
		}
		arrived := seen.until(marker)
		for k, d := range left {
			switch {
			case arrived[k] && d.Verdict != egress.Allowed:
				t.Errorf("%+v arrives under %+v, but: %s by %s", k, source, d.Verdict, d.Rule)
				delete(left, k)
			case arrived[k] || d.Verdict != egress.Allowed:
				delete(left, k) // denied packets had their chance
			}
		}
	}
	for k, d := range left {
		t.Errorf("%+v does not arrive under %+v, but: %s by %s", k, source, d.Verdict, d.Rule)
	}
}

func randomPolicy(r *rand.Rand) *agents.EgressPolicy {
	if r.IntN(10) == 0 {
		return nil
	}
	p := &agents.EgressPolicy{}
	entry := func() string {
		a := randomAddress(r, nil)
		switch r.IntN(3) {
		case 0:
			return a.String()
		case 1:
			return netip.PrefixFrom(a, r.IntN(a.BitLen()+1)).String()
		default:
			return netip.PrefixFrom(a, a.BitLen()/4+r.IntN(a.BitLen()/2)).Masked().String()
		}
	}
	for range r.IntN(8) {
		p.AllowOut = append(p.AllowOut, entry())
	}
	for range r.IntN(8) {
		p.DenyOut = append(p.DenyOut, entry())
	}
	switch r.IntN(4) {
	case 0:
		no := false
		p.Internet = &no
	case 1:
		p.DenyOut = append(p.DenyOut, "0.0.0.0/0")
	case 2:
		p.DenyOut = append(p.DenyOut, "::/0")
	}
	if r.IntN(3) == 0 {
		p.AllowOut = append(p.AllowOut, "*.example.com")
	}
	return p
}

// randomRules are those of a networkPolicy, in every other call, and the ranges in them.
func randomRules(r *rand.Rand, p *agents.EgressPolicy) (rules *agents.NetworkPolicy, near []string) {
	if r.IntN(2) == 0 {
		return nil, nil
	}
	rules = &agents.NetworkPolicy{}
	for range r.IntN(4) {
		var rule networkingv1.NetworkPolicyEgressRule
		for range r.IntN(4) {
			peer, ranges := randomPeer(r, p)
			rule.To, near = append(rule.To, peer), append(near, ranges...)
		}
		for range r.IntN(4) {
			rule.Ports = append(rule.Ports, randomPort(r))
		}
		rules.Egress = append(rules.Egress, rule)
	}
	return rules, near
}

func randomPeer(r *rand.Rand, p *agents.EgressPolicy) (peer networkingv1.NetworkPolicyPeer, near []string) {
	a := randomAddress(r, p)
	whole := netip.PrefixFrom(a, r.IntN(a.BitLen()/2)).Masked()
	peer.IPBlock = &networkingv1.IPBlock{CIDR: whole.String()}
	for range r.IntN(3) {
		hole := netip.PrefixFrom(randomIn(r, whole), whole.Bits()+1+r.IntN(8)).Masked()
		peer.IPBlock.Except = append(peer.IPBlock.Except, hole.String())
	}
	return peer, append(peer.IPBlock.Except, peer.IPBlock.CIDR)
}

func randomPort(r *rand.Rand) (p networkingv1.NetworkPolicyPort) {
	if r.IntN(3) > 0 {
		p.Protocol = new([]corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}[r.IntN(3)])
	}
	switch first := 1024 + r.Int32N(5); r.IntN(6) {
	case 0: // all
	case 1:
		p.Port = new(intstr.FromInt32(53))
	case 2, 3:
		p.Port, p.EndPort = new(intstr.FromInt32(first)), new(first+r.Int32N(3))
	default:
		p.Port = new(intstr.FromInt32(first))
	}
	return p
}

// randomAddress is often near an address of the policy.
func randomAddress(r *rand.Rand, p *agents.EgressPolicy, near ...string) netip.Addr {
	if p != nil {
		near = append(append(near, p.AllowOut...), p.DenyOut...)
	}
	near = append(near, "9.9.9.9", "2620:fe::fe", "10.77.0.0/16", "fd77::/32", "169.254.169.254", "192.168.0.0/16", "172.16.0.0/12",
		"2001:db8::/32", "fd00::/8", "2002::/16", "2606::/16", "8.0.0.0/8", "0.0.0.0/0", "11.0.0.1", "2600::1", "203.0.113.0/24")
	for {
		text := near[r.IntN(len(near))]
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			a, err := netip.ParseAddr(text)
			if err != nil {
				continue // a name
			}
			prefix = netip.PrefixFrom(a, a.BitLen())
		}
		if a := randomIn(r, prefix); usable(a) {
			return a
		}
	}
}

func randomIn(r *rand.Rand, prefix netip.Prefix) netip.Addr {
	b := prefix.Addr().AsSlice()
	for bit := prefix.Bits(); bit < len(b)*8; bit++ {
		if r.IntN(2) == 0 {
			b[bit/8] ^= 0x80 >> (bit % 8)
		}
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// usable excludes addresses that Linux never sends to, or sends to itself or a neighbour.
func usable(a netip.Addr) bool {
	for _, text := range []string{
		"10.201.0.0/24", "fd01:2:3::/64", "11.0.0.2/31", "11.0.0.0/32", "2600::2/127", "2600::/128",
		"0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3", "::/8", "fe80::/10", "ff00::/8",
	} {
		if netip.MustParsePrefix(text).Contains(a) {
			return false
		}
	}
	return true
}

// sender sends first packets of connections from a namespace.
type sender struct {
	t    *testing.T
	path string
	udp  [2]int
}

func newSender(t *testing.T, path string) *sender {
	t.Helper()
	s := &sender{t: t, path: path, udp: [2]int{-1, -1}}
	s.renew()
	t.Cleanup(func() {
		for _, fd := range s.udp {
			_ = unix.Close(fd)
		}
	})
	return s
}

// renew makes UDP start new connections.
func (s *sender) renew() {
	s.t.Helper()
	must(s.t, inside(s.t, s.path, func() (err error) {
		for i, domain := range []int{unix.AF_INET, unix.AF_INET6} {
			_ = unix.Close(s.udp[i])
			if s.udp[i], err = unix.Socket(domain, unix.SOCK_DGRAM, 0); err != nil {
				return err
			}
		}
		return nil
	}))
}

func (s *sender) send(k egress.Packet) {
	s.t.Helper()
	var to unix.Sockaddr = &unix.SockaddrInet6{Port: int(k.Port), Addr: k.Address.As16()}
	domain, udp := unix.AF_INET6, s.udp[1]
	if k.Address.Is4() {
		to, domain, udp = &unix.SockaddrInet4{Port: int(k.Port), Addr: k.Address.As4()}, unix.AF_INET, s.udp[0]
	}
	if k.Protocol == "udp" {
		_ = unix.Sendto(udp, []byte("probe"), 0, to) // an error may belong to the previous packet
		return
	}
	must(s.t, inside(s.t, s.path, func() error {
		fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		_ = unix.Connect(fd, to)
		return unix.Close(fd)
	}))
}

// watcher records the packets that arrive in the internet.
type watcher struct {
	t      *testing.T
	fd     int
	marked uint16
}

func (w *internet) watch(t *testing.T) *watcher {
	t.Helper()
	v := &watcher{t: t}
	must(t, inside(t, w.path, func() (err error) {
		const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
		if v.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, all); err != nil {
			return err
		}
		l, err := net.InterfaceByName("net0")
		if err != nil {
			return err
		}
		if err := unix.SetsockoptInt(v.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20); err != nil {
			return err
		}
		return unix.Bind(v.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: l.Index})
	}))
	t.Cleanup(func() { _ = unix.Close(v.fd) })
	tv := unix.NsecToTimeval(int64(100 * time.Millisecond))
	must(t, unix.SetsockoptTimeval(v.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv))
	return v
}

// until returns the arrivals before a packet of the marker.
func (v *watcher) until(marker *sender) map[egress.Packet]bool {
	v.t.Helper()
	v.marked++
	mark := egress.Packet{Address: netip.MustParseAddr("99.99.99.99"), Port: 1024 + v.marked, Protocol: "udp"}
	arrived := map[egress.Packet]bool{}
	b := make([]byte, 2048)
	for began := time.Now(); time.Since(began) < soon; {
		marker.send(mark)
		for {
			size, from, err := unix.Recvfrom(v.fd, b, 0)
			if err != nil {
				break // timeout: send the mark again
			}
			if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
				continue
			}
			k := parse(b[:size])
			if k == mark {
				return arrived
			}
			arrived[k] = true
		}
	}
	v.t.Fatal("no mark arrives")
	return nil
}

func parse(b []byte) (k egress.Packet) {
	var rest []byte
	var number byte
	switch {
	case len(b) > 20 && b[0]>>4 == 4:
		k.Address, _ = netip.AddrFromSlice(b[16:20])
		number, rest = b[9], b[int(b[0]&15)*4:]
	case len(b) > 40 && b[0]>>4 == 6:
		k.Address, _ = netip.AddrFromSlice(b[24:40])
		number, rest = b[6], b[40:]
	}
	if len(rest) < 8 {
		return k
	}
	k.Protocol = map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[number]
	k.Port = binary.BigEndian.Uint16(rest[2:])
	return k
}
