package peers

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hashicorp/memberlist"
)

// hole is a listener that accepts connections and never responds.
type hole struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

func newHole(t *testing.T) *hole {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.60:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &hole{Listener: l}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			h.mu.Lock()
			h.conns = append(h.conns, c)
			h.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
		for _, c := range h.conns {
			_ = c.Close()
		}
	})
	return h
}

// full is a port whose kernel drops connections: its backlog is full.
func full(t *testing.T) netip.AddrPort {
	return fullBacklog(t, "127.0.0.61")
}

// TestBlackHole has a member whose push port swallows everything, in two ways. The others get pushes
// all the same, Push returns each time, what waits for it is bounded, and it ends with Run.
func TestBlackHole(t *testing.T) {
	for name, port := range map[string]func() netip.AddrPort{
		"accepts and never responds": func() netip.AddrPort { return netip.MustParseAddrPort(newHole(t).Addr().String()) },
		"drops packets":              func() netip.AddrPort { return full(t) },
	} {
		t.Run(name, func(t *testing.T) {
			g := newGroup(t)
			const room = 100
			cfg := g.config("r0", "127.0.0.10")
			cfg.KeyFile, cfg.Queue = filepath.Join(g.dir, "keys"), room
			first := g.start(cfg)
			join := []string{first.Self().Gossip.String()}
			cfg = g.config("good", "127.0.0.11")
			cfg.KeyFile, cfg.Seeds, cfg.Queue = filepath.Join(g.dir, "keys"), join, 10*room
			good := g.start(cfg)
			hole := g.impostor("hole", port(), good.keys.ring, join)
			defer hole()
			g.eventually(func() bool { return len(first.Members()) == 2 }, "both are members")
			g.pushed(first, good, 9999)

			// All pushes are done before anything is awaited: none can have waited for the hole, which
			// never answers.
			const n = 50 * room
			for i := range n {
				first.Push(testRoute(i%room, fmt.Sprint(i+1)))
			}
			for i := range room {
				g.knows(good, testRoute(i, "").ID, fmt.Sprint(n-room+i+1))
			}
			// More sandboxes than the queue has room for, in steps that the good one gets.
			for i := range 3 * room {
				first.Push(testRoute(room+i, "1"))
				g.knows(good, testRoute(room+i, "").ID, "1")
				if q := count(t, first, "queued"); q > 2*room {
					t.Fatalf("%v queued", q)
				}
			}
			if count(t, first, "lost_total", lostOverflow) == 0 {
				t.Error("no overflow counted")
			}
			if len(first.Members()) != 2 {
				t.Error("the hole is no member any more: this test tests nothing")
			}
			first.stop() // and it ends, with a request under way
		})
	}
}

// impostor takes part in the gossip as a member whose pushes go to an address.
func (g *group) impostor(name string, push netip.AddrPort, keys *memberlist.Keyring, join []string) (stop func()) {
	g.t.Helper()
	c := memberlist.DefaultLANConfig()
	steady(c)
	c.Name, c.BindAddr, c.BindPort, c.AdvertisePort, c.Keyring = name, "127.0.0.62", 0, 0, keys
	c.LogOutput = discarding{}
	c.Delegate = announcer{&Replica{self: Member{Push: push, Boot: "hole"}, keys: &keyring{}}}
	list, err := memberlist.Create(c)
	if err != nil {
		g.t.Fatal(err)
	}
	if _, err := list.Join(join); err != nil {
		g.t.Fatal(err)
	}
	return func() { _ = list.Shutdown() }
}

type discarding struct{}

func (discarding) Write(b []byte) (int, error) { return len(b), nil }
