package netdev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/netdev/rates"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// testNetwork opens a network for one test and destroys it at the end.
func testNetwork(t *testing.T, change ...func(*Config)) *Network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for network namespaces")
	}
	tag := fmt.Sprintf("t%05x", rand.Uint32()&0xfffff)
	cfg := Config{
		Bridge: "br" + tag, Table: "barchan-" + tag, NetnsPrefix: "bc" + tag + "-",
		Subnet: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200 + byte(rand.IntN(50)), byte(rand.IntN(256)), 0}), 24),
		Log:    slog.New(slog.DiscardHandler),
	}
	for _, c := range change {
		c(&cfg)
	}
	n, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := n.Destroy(ctx); err != nil {
			t.Errorf("destroy: %v", err)
		}
		if _, err := net.InterfaceByName(cfg.Bridge); err == nil {
			t.Errorf("bridge %s outlived Destroy", cfg.Bridge)
		}
		n.Close()
	})
	if err := n.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	return n
}

// endpoint is the i-th address of a network after the gateway.
func endpoint(n *Network, i int) Endpoint {
	a := n.Gateway()
	for range i {
		a = a.Next()
	}
	return Endpoint{ID: fmt.Sprintf("i%d", i), Address: a}
}

// inside runs f on a thread in a network namespace. f must return: it cannot end the test.
func inside(t *testing.T, path string, f func() error) error {
	t.Helper()
	ns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	return inNamespace(ns, f)
}

// listen sends one line to each client, in the namespace that it is called in.
func listen(t *testing.T, address string) error {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", address)
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
			fmt.Fprint(c, "hello")
			_ = c.Close()
		}
	}()
	return nil
}

// dial returns the line from an address; only a fault uses up the limit.
func dial(t *testing.T, address string, limit time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp4", address)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	b := make([]byte, 5)
	if _, err := c.Read(b); err != nil || !bytes.Equal(b, []byte("hello")) {
		return fmt.Errorf("read %q: %w", b, err)
	}
	return nil
}

const (
	soon  = eventually.Patience
	never = 300 * time.Millisecond
)

func TestReachability(t *testing.T) {
	n := testNetwork(t)
	a, b := endpoint(n, 1), endpoint(n, 2)
	var paths []string
	for _, ep := range []Endpoint{a, b} {
		at, err := n.Attach(t.Context(), ep)
		if err != nil {
			t.Fatal(err)
		}
		if at.NetnsPath != n.NetnsPath(ep.ID) || at.HostLink != n.HostLink(ep.ID) {
			t.Errorf("attachment %+v has other names than announced", at)
		}
		paths = append(paths, at.NetnsPath)
		if err := inside(t, at.NetnsPath, func() error { return listen(t, "0.0.0.0:8080") }); err != nil {
			t.Fatal(err)
		}
	}
	if err := listen(t, n.Gateway().String()+":0"); err != nil {
		t.Fatal(err)
	}
	if err := listen(t, n.Gateway().String()+":18080"); err != nil {
		t.Fatal(err)
	}
	for _, ep := range []Endpoint{a, b} {
		if err := dial(t, ep.Address.String()+":8080", soon); err != nil {
			t.Errorf("the host cannot reach %s: %v", ep.Address, err)
		}
	}
	if err := dial(t, n.Gateway().String()+":18080", soon); err != nil {
		t.Fatalf("the host cannot reach its own listener, so that the next checks prove nothing: %v", err)
	}
	for name, address := range map[string]string{
		"its neighbour": b.Address.String() + ":8080", "the gateway": n.Gateway().String() + ":18080", "metadata": "169.254.169.254:80",
	} {
		if err := inside(t, paths[0], func() error { return dial(t, address, never) }); err == nil {
			t.Errorf("a sandbox reaches %s at %s", name, address)
		}
	}
}

func TestReachableExceptionAndResolver(t *testing.T) {
	n := testNetwork(t, func(c *Config) { c.Resolvers = []netip.Addr{c.Subnet.Masked().Addr().Next()} })
	at, err := n.Attach(t.Context(), endpoint(n, 1))
	if err != nil {
		t.Fatal(err)
	}
	if err := listen(t, n.Gateway().String()+":53"); err != nil {
		t.Fatal(err)
	}
	if err := inside(t, at.NetnsPath, func() error { return dial(t, n.Gateway().String()+":53", soon) }); err != nil {
		t.Errorf("a sandbox cannot reach its resolver: %v", err)
	}
}

// Packets from a sandbox that uses its neighbour's address are dropped.
func TestSpoofedAddressIsDropped(t *testing.T) {
	n := testNetwork(t)
	thief, victim := endpoint(n, 1), endpoint(n, 2)
	at, err := n.Attach(t.Context(), thief)
	if err != nil {
		t.Fatal(err)
	}
	serve := func() error { return listen(t, "0.0.0.0:8080") }
	if err := inside(t, at.NetnsPath, serve); err != nil {
		t.Fatal(err)
	}
	if err := dial(t, thief.Address.String()+":8080", soon); err != nil {
		t.Fatal(err)
	}
	// The forwarding entry has the thief's own MAC; only the rules admit the victim's address.
	port := n.port(thief)
	if err := n.rules.Forget(port); err != nil {
		t.Fatal(err)
	}
	port.Address, port.MAC = victim.Address, MACOf(victim.Address)
	if err := n.rules.Admit(port); err != nil {
		t.Fatal(err)
	}
	if err := dial(t, thief.Address.String()+":8080", never); err == nil {
		t.Error("received a packet from an address that the port does not own")
	}
	if err := n.Adopt(t.Context(), thief); err != nil {
		t.Fatal(err)
	}
	if err := dial(t, thief.Address.String()+":8080", soon); err != nil {
		t.Errorf("adoption did not admit the port again: %v", err)
	}
}

func TestAttachAndDetachRepeat(t *testing.T) {
	n := testNetwork(t)
	ep := endpoint(n, 1)
	if err := n.Detach(t.Context(), ep); err != nil {
		t.Fatalf("detach of what never was: %v", err)
	}
	for range 3 {
		if _, err := n.Attach(t.Context(), ep); err != nil {
			t.Fatal(err)
		}
	}
	if ids, err := n.List(t.Context()); err != nil || len(ids) != 1 || ids[0] != ep.ID {
		t.Errorf("List = %v, %v", ids, err)
	}
	// A namespace without a name whose link still exists.
	if err := unix.Unmount(n.NetnsPath(ep.ID), unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(n.NetnsPath(ep.ID)); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Attach(t.Context(), ep); err != nil {
		t.Fatalf("attach over a leftover link: %v", err)
	}
	for range 2 {
		if err := n.Detach(t.Context(), Endpoint{ID: ep.ID}); err != nil {
			t.Fatal(err)
		}
	}
	if links, err := n.Links(t.Context()); err != nil || len(links) != 0 {
		t.Errorf("links %v, %v outlived Detach", links, err)
	}
}

// Connections to a detached sandbox are reset at once.
func TestDetachEndsConnections(t *testing.T) {
	n := testNetwork(t)
	ep := endpoint(n, 1)
	at, err := n.Attach(t.Context(), ep)
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan net.Conn, 1)
	err = inside(t, at.NetnsPath, func() error {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", "0.0.0.0:8080")
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			if c, err := l.Accept(); err == nil {
				accepted <- c
			}
		}()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := (&net.Dialer{Timeout: soon}).DialContext(t.Context(), "tcp4", ep.Address.String()+":8080")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	far := <-accepted
	defer func() { _ = far.Close() }()
	if err := n.Detach(t.Context(), ep); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(soon)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read after detach: %v, want a reset", err)
	}
}

// Replacing rules does not interrupt running sandboxes.
func TestReopenKeepsAttachments(t *testing.T) {
	n := testNetwork(t)
	ep := endpoint(n, 1)
	at, err := n.Attach(t.Context(), ep)
	if err != nil {
		t.Fatal(err)
	}
	if err := inside(t, at.NetnsPath, func() error { return listen(t, "0.0.0.0:8080") }); err != nil {
		t.Fatal(err)
	}
	again, err := New(n.cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := again.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := dial(t, ep.Address.String()+":8080", soon); err != nil {
		t.Error(err)
	}
	if err := again.Adopt(t.Context(), ep); err != nil {
		t.Error(err)
	}
	if err := again.Adopt(t.Context(), endpoint(n, 2)); err == nil {
		t.Error("adopted a sandbox that is not attached")
	}
}

func TestTwoInstancesSideBySide(t *testing.T) {
	first, second := testNetwork(t), testNetwork(t)
	ep1, ep2 := endpoint(first, 1), endpoint(second, 1)
	for n, ep := range map[*Network]Endpoint{first: ep1, second: ep2} {
		at, err := n.Attach(t.Context(), ep)
		if err != nil {
			t.Fatal(err)
		}
		if err := inside(t, at.NetnsPath, func() error { return listen(t, "0.0.0.0:8080") }); err != nil {
			t.Fatal(err)
		}
	}
	if first.HostLink("x") == second.HostLink("x") {
		t.Error("two instances would name a link alike")
	}
	err := inside(t, first.NetnsPath(ep1.ID), func() error { return dial(t, ep2.Address.String()+":8080", never) })
	if err == nil {
		t.Error("a sandbox reaches another instance's")
	}
	if err := first.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := dial(t, ep2.Address.String()+":8080", soon); err != nil {
		t.Errorf("destroying one instance broke the other: %v", err)
	}
}

// Instances in one process change their rules concurrently.
func TestConcurrentInstances(t *testing.T) {
	networks := []*Network{testNetwork(t), testNetwork(t)}
	concurrently(len(networks), func(i int) {
		n := networks[i]
		again, err := New(n.cfg) // without a set yet
		if err == nil {
			defer again.Close()
			err = errors.Join(again.Open(t.Context()), n.Open(t.Context()))
		}
		if err != nil {
			t.Error(err)
		}
	})
}

func TestNewRefuses(t *testing.T) {
	good := Config{
		Bridge: "br0", Table: "t", NetnsPrefix: "p-", Subnet: netip.MustParsePrefix("10.1.0.0/24"), Log: slog.New(slog.DiscardHandler),
	}
	for name, change := range map[string]func(*Config){
		"no bridge":           func(c *Config) { c.Bridge = "" },
		"long bridge":         func(c *Config) { c.Bridge = strings.Repeat("b", 16) },
		"no subnet":           func(c *Config) { c.Subnet = netip.Prefix{} },
		"small subnet":        func(c *Config) { c.Subnet = netip.MustParsePrefix("10.1.0.0/31") },
		"IPv6":                func(c *Config) { c.Subnet = netip.MustParsePrefix("fd00::/64") },
		"foreign gateway":     func(c *Config) { c.Gateway = netip.MustParseAddr("10.2.0.1") },
		"IPv4 as IPv6":        func(c *Config) { c.Subnet6 = netip.MustParsePrefix("10.1.0.0/24") },
		"small IPv6":          func(c *Config) { c.Subnet6 = netip.MustParsePrefix("fd00::/97") },
		"negative spares":     func(c *Config) { c.Spares = -1 },
		"no table":            func(c *Config) { c.Table = "" },
		"no namespace prefix": func(c *Config) { c.NetnsPrefix = "" },
		"slash in prefix":     func(c *Config) { c.NetnsPrefix = "a/b" },
		"no logger":           func(c *Config) { c.Log = nil },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := good
			change(&cfg)
			if n, err := New(cfg); err == nil {
				n.Close()
				t.Error("accepted")
			}
		})
	}
}

func TestBridgeNameConflict(t *testing.T) {
	n := testNetwork(t)
	at, err := n.Attach(t.Context(), endpoint(n, 1))
	if err != nil {
		t.Fatal(err)
	}
	cfg := n.cfg
	cfg.Bridge = at.HostLink
	other, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.Open(t.Context()); err == nil || errors.Is(err, unix.EEXIST) {
		t.Errorf("Open over a veth = %v", err)
	}
}

// BenchmarkAttach compares attachments from a spare with new ones. Each ends with Detach, under
// Run, which is measured too.
func BenchmarkAttach(b *testing.B) {
	for _, c := range []struct {
		name   string
		spares int
	}{{"spare", 1}, {"new", 0}} {
		b.Run(c.name, func(b *testing.B) { benchmarkAttach(b, c.spares) })
	}
}

func benchmarkAttach(b *testing.B, spares int) {
	if os.Geteuid() != 0 {
		b.Skip("needs root")
	}
	n, err := New(Config{
		Bridge: "brbench", Table: "barchan-bench", NetnsPrefix: "bcbench-", Spares: spares,
		Rates:  rates.Limits{Bytes: 500e6, Packets: 200_000},
		Subnet: netip.MustParsePrefix("10.199.0.0/16"), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		b.Fatal(err)
	}
	defer n.Close()
	if err := n.Open(b.Context()); err != nil {
		b.Fatal(err)
	}
	defer func() { _ = n.Destroy(context.WithoutCancel(b.Context())) }()
	n.spares.setRunning(true) // the kernel removes detached namespaces
	var took [2][]time.Duration
	timed := func(i int, f func() error) {
		begin := time.Now()
		if err := f(); err != nil {
			b.Fatal(err)
		}
		took[i] = append(took[i], time.Since(begin))
	}
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		fill(b, n)
		ep := endpoint(n, 1+i%1000)
		b.StartTimer()
		timed(0, func() error { _, err := n.Attach(b.Context(), ep); return err })
		b.StopTimer()
		timed(1, func() error { return n.Detach(b.Context(), ep) })
		b.StartTimer()
	}
	for i, name := range []string{"attach", "detach"} {
		slices.Sort(took[i])
		b.ReportMetric(float64(took[i][len(took[i])/2].Microseconds()), "p50-us-"+name)
		b.ReportMetric(float64(took[i][len(took[i])*99/100].Microseconds()), "p99-us-"+name)
	}
}
