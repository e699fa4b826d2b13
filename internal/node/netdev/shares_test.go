package netdev

import (
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/barchan-dev/barchan/internal/node/netdev/rates"
	"github.com/barchan-dev/barchan/internal/testkit/ownnet"
)

// A sandbox has as many connections as it may; one more is not made, and another sandbox is not touched.
func TestConnectionsOfASandbox(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	const most = 20
	w := newInternet(t)
	w.serveEcho(t, 80)
	n := egressNetwork(t, func(cfg *Config) { cfg.Connections = most })
	a, b := attach(t, n, 1), attach(t, n, 2)
	var open []*echo
	for range most {
		open = append(open, n.open(t, a, "8.8.8.8:80"))
	}
	if err := n.try(t, a, "1.1.1.1:80", never); err == nil {
		t.Errorf("connection %d was made", most+1)
	}
	if err := n.try(t, b, "8.8.8.8:80", soon); err != nil {
		t.Errorf("another sandbox: %v", err)
	}
	for _, e := range open {
		if err := e.ping(soon); err != nil {
			t.Errorf("an open one: %v", err)
		}
	}
	must(t, n.Detach(t.Context(), a))
	must(t, n.Detach(t.Context(), b))
	leftovers(t, n)
}

// What the instance itself removes is no loss, or it would come back.
func TestRemovedRulesAreIntact(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	n := egressNetwork(t)
	lost := func() bool {
		intact, err := n.rules.Intact()
		must(t, err)
		return !intact
	}
	if lost() {
		t.Error("rules are lost after Open")
	}
	conn, err := nftables.New()
	must(t, err)
	conn.FlushRuleset()
	must(t, conn.Flush())
	if !lost() {
		t.Error("a flush is no loss")
	}
	must(t, n.Restore())
	if lost() {
		t.Error("rules are lost after Restore")
	}
	must(t, n.Destroy(t.Context()))
	if lost() {
		t.Error("rules are lost after Destroy")
	}
}

// A sandbox sends and receives no more packets and bytes in a second than it may; its neighbour does not notice, and
// the bounds come back after a flush.
func TestRatesOfASandbox(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	limits := rates.Limits{Packets: 1000, Bytes: 1_000_000}
	w := newInternet(t)
	w.serveEcho(t, 80)
	arrived := w.countDatagrams(t, 81)
	n := egressNetwork(t, func(cfg *Config) { cfg.Rates = limits })
	a, b := attach(t, n, 1), attach(t, n, 2)
	neighbour := n.open(t, b, "8.8.8.8:80")

	sent := func(when string) {
		t.Helper()
		wantBounded(t, "sent "+when, limits.Packets, arrived, flood{n.NetnsPath(a.ID), "8.8.8.8:81", 100})
		if err := neighbour.ping(soon); err != nil {
			t.Errorf("neighbour of a flood %s: %v", when, err)
		}
	}
	sent("at first")
	received := countDatagrams(t, n.NetnsPath(a.ID), 82)
	wantBounded(t, "received", limits.Packets, received, flood{"", a.Address.String() + ":82", 100})
	// Of large packets the bytes are the bound; the first second's may come at once.
	wantBounded(t, "large", 2*limits.Bytes/1400, arrived, flood{n.NetnsPath(a.ID), "8.8.8.8:81", 1400})

	conn, err := nftables.New()
	must(t, err)
	conn.FlushRuleset()
	must(t, conn.Flush())
	must(t, n.Restore())
	must(t, n.Adopt(t.Context(), a))
	must(t, n.Adopt(t.Context(), b))
	sent("after a flush")

	must(t, n.Detach(t.Context(), a))
	again := endpoint6(n, 9) // the sandbox resumes at another address
	again.ID = a.ID
	_, err = n.Attach(t.Context(), again)
	must(t, err)
	sent("at a new address")
	must(t, n.Detach(t.Context(), again))
	must(t, n.Detach(t.Context(), b))
	leftovers(t, n)
}

// TCP adapts to the bound in bytes, in both directions, and transfers everything.
func TestRatesOfConnections(t *testing.T) {
	if !ownnet.Inside(t) {
		return
	}
	const rate, size = 8_000_000, 16_000_000
	w := newInternet(t)
	must(t, inside(t, w.path, func() error {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", ":80")
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			if c, err := l.Accept(); err == nil {
				_, _ = io.Copy(io.Discard, c)
				_, _ = io.CopyN(c, zeroes{}, size)
				_ = c.Close()
			}
		}()
		return nil
	}))
	n := egressNetwork(t, func(cfg *Config) { cfg.Rates.Bytes = rate })
	a := attach(t, n, 1)
	c := n.open(t, a, "8.8.8.8:80").Conn.(*net.TCPConn)
	began := time.Now()
	took := func(what string) {
		t.Helper()
		// A second's bytes come at once, and those that the rate adds meanwhile.
		if took, least := time.Since(began), time.Second*(size-rate-rate/10)/rate; took < least {
			t.Errorf("%s of %d bytes in %s, want at least %s", what, size, took, least)
		}
		began = time.Now()
	}
	go func() {
		_, _ = io.CopyN(c, zeroes{}, size)
		_ = c.CloseWrite()
	}()
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	took("upload")
	if got, err := io.Copy(io.Discard, c); err != nil || got != size-1 {
		t.Fatalf("got %d bytes, %v", got, err)
	}
	took("download")
	must(t, n.Detach(t.Context(), a))
}

type zeroes struct{}

func (zeroes) Read(b []byte) (int, error) { return len(b), nil }

// flood is datagrams of a size, from a namespace or this one, as fast as they can be sent.
type flood struct {
	from, to string
	size     int
}

// run sends for half a second, and returns how many it sent and how long it took.
func (f flood) run(t *testing.T) (sent int, took time.Duration) {
	t.Helper()
	var c net.Conn
	connect := func() (err error) {
		c, err = (&net.Dialer{}).DialContext(t.Context(), "udp4", f.to)
		return err
	}
	if f.from == "" {
		must(t, connect())
	} else {
		must(t, inside(t, f.from, connect))
	}
	defer func() { _ = c.Close() }()
	began := time.Now()
	for took < time.Second/2 {
		for range 100 {
			if _, err := c.Write(make([]byte, f.size)); err == nil {
				sent++
			}
		}
		took = time.Since(began)
	}
	return sent, took
}

func (w *internet) countDatagrams(t *testing.T, port int) *atomic.Int64 {
	t.Helper()
	return countDatagrams(t, w.path, port)
}

func countDatagrams(t *testing.T, path string, port int) *atomic.Int64 {
	t.Helper()
	var count atomic.Int64
	must(t, inside(t, path, func() error {
		p, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp4", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = p.Close() })
		must(t, p.(*net.UDPConn).SetReadBuffer(4<<20))
		go func() {
			b := make([]byte, 2000)
			for {
				if _, _, err := p.ReadFrom(b); err != nil {
					return
				}
				count.Add(1)
			}
		}()
		return nil
	}))
	return &count
}

// wantBounded requires that of a flood no more than the rate has arrived.
func wantBounded(t *testing.T, what string, rate uint64, arrived *atomic.Int64, f flood) {
	t.Helper()
	sent, took := f.run(t)
	most := int64(1.2*float64(rate)*took.Seconds()) + int64(rate)/5
	if int64(sent) < 2*most {
		t.Fatalf("%s: only %d packets in %s, which is no flood", what, sent, took)
	}
	if got := arrived.Swap(0); got == 0 || got > most {
		t.Errorf("%s: %d of %d packets arrived in %s, want 1 to %d", what, got, sent, took, most)
	}
}
