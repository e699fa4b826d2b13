package peers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/peers/trust"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func TestMain(m *testing.M) { eventually.LeaveNoGoroutines(m) }

// group is what the replicas of one test share.
type group struct {
	t    testing.TB
	dir  string
	cuts sync.Map // "from>to host:port" -> true: nothing gets there
	tune func(*memberlist.Config)
}

// peer is a replica at work.
type peer struct {
	*Replica
	table *route.Table
	cfg   Config
	// lastBatch has an element after something was applied.
	received chan struct{}
	taken    atomic.Int64
	stop     func()
}

func newGroup(t testing.TB) *group { return &group{t: t, dir: t.TempDir(), tune: steady} }

func (g *group) config(name, addr string) Config {
	at := netip.AddrPortFrom(netip.MustParseAddr(addr), 0)
	return Config{
		Name: name, Bind: at, PushBind: at, KeyFile: filepath.Join(g.dir, name+".keys"), StateFile: filepath.Join(g.dir, name+".state"),
		TLS: trust.Source{Dir: filepath.Join(g.dir, "ca")}, Metrics: prometheus.NewRegistry(),
		rejoinMin: 20 * time.Millisecond, rejoinMax: 200 * time.Millisecond, tune: g.tune,
	}
}

// fast has failures found in about a second. It finds some on a busy machine that are none: for
// tests that bear members that go and come back.
func fast(c *memberlist.Config) {
	c.ProbeInterval, c.ProbeTimeout = 200*time.Millisecond, 100*time.Millisecond
	c.GossipInterval = 20 * time.Millisecond
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = 2, 1
	c.AwarenessMaxMultiplier = 1
	c.TCPTimeout = time.Second
}

// steady gives up no member that is slow: one that is suspected has twenty seconds to speak.
func steady(c *memberlist.Config) {
	fast(c)
	c.SuspicionMult = 100
	c.TCPTimeout = eventually.Patience
}

// start runs a replica; its key is that of the first of the group unless it has one.
func (g *group) start(cfg Config) *peer {
	g.t.Helper()
	p := &peer{table: route.NewTable(), cfg: cfg, received: make(chan struct{}, 1)}
	take := cfg.OnRoutes
	cfg.OnRoutes = func(from string, batch []push.Route) {
		for _, r := range batch {
			if r.Deleted {
				p.table.Delete(r.ID, r.ResourceVersion)
			} else {
				p.table.Upsert(r.Route)
			}
		}
		p.taken.Add(int64(len(batch)))
		if take != nil {
			take(from, batch)
		}
		signal(p.received)
	}
	var err error
	if p.Replica, err = New(cfg); err != nil {
		g.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(g.t.Context()))
	ended := make(chan error, 1)
	go func() {
		defer close(ended)
		ended <- p.Run(ctx)
	}()
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			g.t.Errorf("%s: %v", cfg.Name, err)
		}
	})
	g.t.Cleanup(p.stop)
	select {
	case <-p.Ready():
	case err := <-ended:
		g.t.Fatalf("%s: %v", cfg.Name, err)
	}
	return p
}

// members starts n replicas that hold one key and have the first as their seed, and waits until
// all members know each other.
func (g *group) members(n int) []*peer {
	g.t.Helper()
	var all []*peer
	for i := range n {
		cfg := g.config(fmt.Sprintf("r%d", i), fmt.Sprintf("127.0.0.%d", 10+i))
		cfg.KeyFile = filepath.Join(g.dir, "keys") // each reads it when it starts
		if i > 0 {
			cfg.Seeds = []string{all[0].Self().Gossip.String()}
		}
		if g.t.Name() != "" {
			cfg.reach = g.reach(cfg.Name)
		}
		all = append(all, g.start(cfg))
	}
	for _, p := range all {
		g.eventually(func() bool { return len(p.Members()) == n-1 }, p.cfg.Name+" knows all")
	}
	for _, p := range all {
		g.eventually(func() bool { return count(g.t, p, "batches_total", resultOK) >= float64(n-1) }, p.cfg.Name+" pushes to all")
	}
	return all
}

func (g *group) reach(from string) func(string) error {
	return func(addr string) error {
		if _, cut := g.cuts.Load(from + ">" + addr); cut {
			return errors.New("cut")
		}
		return nil
	}
}

// cut parts two replicas, or heals what was cut.
func (g *group) cut(a, b *peer, parted bool) {
	for _, way := range [][2]*peer{{a, b}, {b, a}} {
		for _, addr := range []netip.AddrPort{way[1].Self().Gossip, way[1].Self().Push} {
			if key := way[0].cfg.Name + ">" + addr.String(); parted {
				g.cuts.Store(key, true)
			} else {
				g.cuts.Delete(key)
			}
		}
	}
}

// eventually waits for a state without an event.
func (g *group) eventually(ok func() bool, what string) {
	g.t.Helper()
	eventually.True(g.t, what, ok)
}

// look is a copy of what a lookup finds; nothing of it is set where that is nothing.
func look(table *route.Table, id sandbox.ID) (e route.Entry, ok bool) {
	found, ok := table.Lookup(id)
	if ok {
		e = *found
	}
	return e, ok
}

// knows waits until a replica has a route of a version, or has none with "".
func (g *group) knows(p *peer, id sandbox.ID, version string) {
	g.t.Helper()
	end := time.After(eventually.Patience)
	for {
		e, ok := look(p.table, id)
		if ok == (version != "") && e.ResourceVersion == version {
			return
		}
		select {
		case <-p.received:
		case <-end:
			g.t.Fatalf("%s: never %s at %q, has %q", p.cfg.Name, id, version, e.ResourceVersion)
		}
	}
}

func count(t testing.TB, p *peer, name string, labels ...string) float64 {
	t.Helper()
	families, err := p.cfg.Metrics.(*prometheus.Registry).Gather()
	if err != nil {
		t.Fatal(err)
	}
	var sum float64
	for _, f := range families {
		if f.GetName() != "barchan_peers_"+name {
			continue
		}
		for _, m := range f.GetMetric() {
			if len(labels) == 0 || len(m.GetLabel()) > 0 && m.GetLabel()[0].GetValue() == labels[0] {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// testRoute is a route of a sandbox with the number in its name.
func testRoute(n int, version string) route.Route {
	uid := types.UID(fmt.Sprintf("uid-%d", n))
	return route.Route{
		ID: sandbox.IDOf(uid), Namespace: "team", Name: fmt.Sprintf("s%d", n), UID: uid, State: sandbox.Running,
		Address: netip.AddrFrom4([4]byte{10, 1, byte(n >> 8), byte(n)}), EpochKey: string(uid) + "/1", ResourceVersion: version,
		Access: route.Access{Secure: true, MaskRequestHost: "h"}, Wake: route.Wake{OnTraffic: true, Timeout: time.Minute},
	}
}

func TestThreeExchange(t *testing.T) {
	g := newGroup(t)
	all := g.members(3)
	for i, p := range all {
		p.Push(testRoute(i, "7"))
	}
	for i := range all {
		for j, p := range all {
			if i == j {
				continue
			}
			want := testRoute(i, "7")
			g.knows(p, want.ID, "7")
			if got, _ := look(p.table, want.ID); got.Route != want {
				t.Errorf("%s has %+v, want %+v", p.cfg.Name, got.Route, want)
			}
		}
	}
	all[0].Push(testRoute(0, "9"))
	all[0].PushDelete(testRoute(0, "11"))
	for _, p := range all[1:] {
		g.knows(p, testRoute(0, "").ID, "")
	}
	all[2].Push(testRoute(0, "10")) // late, and older than the tombstone
	all[2].Push(testRoute(5, "1"))
	g.knows(all[1], testRoute(5, "").ID, "1")
	g.knows(all[1], testRoute(0, "").ID, "")
	if n := count(t, all[0], "members"); n != 2 {
		t.Errorf("members: %v", n)
	}
}

func TestPushBeforeAndAfterRun(t *testing.T) {
	g := newGroup(t)
	p := g.start(g.config("alone", "127.0.0.1"))
	p.Push(testRoute(1, "1"))
	p.Push(testRoute(1, "no version"))
	p.stop()
	p.Push(testRoute(1, "2"))
	if n := count(t, p, "lost_total", lostInvalid); n != 1 {
		t.Errorf("lost: %v", n)
	}
}

func TestInvalidRouteDoesNotCostTheBatch(t *testing.T) {
	g := newGroup(t)
	all := g.members(2)
	bad := testRoute(1, "1")
	bad.ID = testRoute(2, "1").ID
	all[0].Push(bad)
	all[0].Push(testRoute(3, "1"))
	g.knows(all[1], testRoute(3, "").ID, "1")
	if _, ok := look(all[1].table, bad.ID); ok {
		t.Error("a route with another's ID was sent")
	}
	g.eventually(func() bool { return count(t, all[0], "lost_total", lostInvalid) == 1 }, "counted")
}

func TestConfig(t *testing.T) {
	g := newGroup(t)
	for field, spoil := range map[string]func(*Config){
		"Name":      func(c *Config) { c.Name = "Not_a name" },
		"Bind":      func(c *Config) { c.Bind = netip.AddrPort{} },
		"PushBind":  func(c *Config) { c.PushBind = netip.AddrPort{} },
		"Advertise": func(c *Config) { c.Bind = netip.MustParseAddrPort("0.0.0.0:0") },
		"KeyFile":   func(c *Config) { c.KeyFile = "" },
		"or else":   func(c *Config) { c.Key = make([]byte, keyBytes) },
		"a Key of":  func(c *Config) { c.KeyFile, c.Key = "", make([]byte, 16) },
		"a Seed of": func(c *Config) { c.TLS = trust.Source{Seed: make([]byte, 16)} },
		"OnRoutes":  func(c *Config) { c.OnRoutes = nil },
		"Queue":     func(c *Config) { c.Queue = -1 },
		"Seeds":     func(c *Config) { c.Seeds = []string{"noport"} },
		"TLS":       func(c *Config) { c.TLS.CAFile = "also" },
	} {
		cfg := g.config("r", "127.0.0.1")
		cfg.OnRoutes = func(string, []push.Route) {}
		spoil(&cfg)
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestMovedMember stops a member without a goodbye, and starts it at another address.
func TestMovedMember(t *testing.T) {
	for _, goodbye := range []bool{true, false} {
		t.Run(fmt.Sprintf("goodbye=%v", goodbye), func(t *testing.T) {
			g := newGroup(t)
			g.tune = fast
			all := g.members(3)
			moved := all[2]
			before := moved.Self()
			if !goodbye {
				g.cut(moved, all[0], true)
				g.cut(moved, all[1], true)
			}
			moved.stop()
			g.cuts.Clear()
			cfg := moved.cfg
			cfg.Bind = netip.MustParseAddrPort("127.0.0.40:0")
			cfg.PushBind, cfg.Seeds, cfg.Metrics = cfg.Bind, nil, prometheus.NewRegistry() // it has its state file
			again := g.start(cfg)
			for _, p := range all[:2] {
				g.eventually(func() bool {
					m, ok := p.member(cfg.Name)
					return ok && m.Boot == again.Self().Boot && m.Push == again.Self().Push
				}, "taken over")
			}
			if again.Self().Boot == before.Boot {
				t.Fatal("the same life")
			}
			g.eventually(func() bool { return len(again.Members()) == 2 }, "rejoined")
			g.pushed(all[0], again, 50)
			g.pushed(again, all[0], 51)
			g.pushed(all[1], again, 52)
		})
	}
}

// pushed pushes versions of a route until one arrives: a sender may not be connected yet when its member is
// first seen, and what was pushed before is not sent again.
func (g *group) pushed(from, to *peer, n int) {
	g.t.Helper()
	version := 0
	g.eventually(func() bool {
		version++
		from.Push(testRoute(n, fmt.Sprint(version)))
		_, ok := look(to.table, testRoute(n, "").ID)
		return ok
	}, fmt.Sprintf("%s pushes to %s", from.cfg.Name, to.cfg.Name))
}

func TestPartitionHeals(t *testing.T) {
	g := newGroup(t)
	g.tune = fast
	all := g.members(4) // two halves of two: neither is alone
	for _, a := range all[:2] {
		for _, b := range all[2:] {
			g.cut(a, b, true)
		}
	}
	for _, p := range all {
		g.eventually(func() bool { return len(p.Members()) == 1 }, p.cfg.Name+" sees half")
	}
	g.pushed(all[0], all[1], 1)
	g.pushed(all[2], all[3], 1)
	for _, a := range all[:2] {
		for _, b := range all[2:] {
			g.cut(a, b, false)
		}
	}
	for _, p := range all {
		g.eventually(func() bool { return len(p.Members()) == 3 }, p.cfg.Name+" sees all")
	}
	g.pushed(all[0], all[3], 2)
	g.pushed(all[3], all[0], 3)
}

// TestMemberBelievedDead has a member lose another that got much from it and is alive, and find
// it again: its pushes are then applied as before.
func TestMemberBelievedDead(t *testing.T) {
	g := newGroup(t)
	all := g.members(2)
	for i := range 20 { // one batch each
		all[0].Push(testRoute(1, fmt.Sprint(i+1)))
		g.knows(all[1], testRoute(1, "").ID, fmt.Sprint(i+1))
	}
	before := count(t, all[1], "refused_total")
	other := all[1].Self()
	n := &memberlist.Node{
		Name: other.Name, Addr: other.Gossip.Addr().AsSlice(), Port: other.Gossip.Port(), Meta: announcer{all[1].Replica}.NodeMeta(memberlist.MetaMaxSize),
	}
	all[0].onLeave(n)
	all[0].onJoin(n)
	all[0].Push(testRoute(2, "1"))
	g.knows(all[1], testRoute(2, "").ID, "1")
	if n := count(t, all[1], "refused_total") - before; n != 0 {
		t.Errorf("%v batches were refused", n)
	}
}

// TestSeedByName has a name that means nothing at first, then another's address, then the right
// one: names are resolved again, permanently.
func TestSeedByName(t *testing.T) {
	g := newGroup(t)
	first := g.members(1)[0]
	var tries atomic.Int64
	cfg := g.config("late", "127.0.0.30")
	cfg.KeyFile = filepath.Join(g.dir, "keys")
	cfg.Seeds = []string{fmt.Sprintf("peers.test:%d", first.Self().Gossip.Port())}
	cfg.lookup = func(_ context.Context, _, host string) ([]netip.Addr, error) {
		switch n := tries.Add(1); {
		case host != "peers.test":
			return nil, fmt.Errorf("resolved %q", host)
		case n < 3:
			return nil, errors.New("no such host")
		case n < 5:
			return []netip.Addr{netip.MustParseAddr("127.0.0.99")}, nil
		default:
			return []netip.Addr{netip.MustParseAddr("127.0.0.99"), first.Self().Gossip.Addr()}, nil
		}
	}
	late := g.start(cfg)
	g.eventually(func() bool { return len(late.Members()) == 1 && len(first.Members()) == 1 }, "joined")
	if n := count(t, late, "joins_total", resultFailed); n < 3 {
		t.Errorf("failed joins: %v", n)
	}
}

func TestOtherKeyNeverJoins(t *testing.T) {
	g := newGroup(t)
	first := g.members(1)[0]
	cfg := g.config("stranger", "127.0.0.31") // with a key file of its own
	cfg.Seeds = []string{first.Self().Gossip.String()}
	stranger := g.start(cfg)
	g.eventually(func() bool { return count(t, first, "gossip_refused_total", gossipKey) >= 3 }, "streams refused and counted")
	// A packet too: what only UDP carries.
	g.eventually(func() bool {
		to := memberlist.Address{Addr: first.Self().Gossip.String()}
		before := count(t, first, "gossip_refused_total", gossipKey)
		_ = stranger.gossip.Load().SendToAddress(to, []byte("hello"))
		return count(t, first, "gossip_refused_total", gossipKey) > before
	}, "packets refused and counted")
	if len(first.Members())+len(stranger.Members()) != 0 {
		t.Errorf("joined: %v, %v", first.Members(), stranger.Members())
	}
}

// TestGivenKey has replicas share a key and the seed of a CA instead of files. They keep no state, and contact no absent member.
func TestGivenKey(t *testing.T) {
	g := newGroup(t)
	key, seed := bytes.Repeat([]byte{1}, keyBytes), bytes.Repeat([]byte{2}, keyBytes)
	config := func(name, addr string, seeds ...string) Config {
		cfg := g.config(name, addr)
		cfg.KeyFile, cfg.StateFile, cfg.Seeds, cfg.tune = "", "", seeds, fast
		cfg.Key, cfg.TLS = key, trust.Source{Seed: seed}
		return cfg
	}
	first := g.start(config("r0", "127.0.0.10"))
	gossip := first.Self().Gossip.String()
	second := g.start(config("r1", "127.0.0.11", gossip))
	other := config("r2", "127.0.0.12", gossip)
	other.Key = bytes.Repeat([]byte{3}, keyBytes)
	g.start(other)
	g.eventually(func() bool { return len(first.Members()) == 1 && len(second.Members()) == 1 }, "joined")
	g.pushed(first, second, 1)
	g.pushed(second, first, 2)
	g.eventually(func() bool { return count(t, first, "gossip_refused_total", gossipKey) > 0 }, "another key is refused")
	if err := first.AddKey(t.Context(), NewKey()); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("another key is added: %v", err)
	}
	second.stop()
	g.eventually(func() bool { return len(first.Members()) == 0 }, "gone")
	if missing := first.missing(t.Context()); len(missing) != 0 {
		t.Errorf("contacts %v", missing)
	}
	if files, err := filepath.Glob(filepath.Join(g.dir, "*")); err != nil || len(files) != 0 {
		t.Errorf("files %v, %v", files, err)
	}
}

func TestStateFile(t *testing.T) {
	g := newGroup(t)
	all := g.members(2)
	g.eventually(func() bool { return all[1].loadMembers()["r0"].Address == all[0].Self().Gossip }, "written down")
	r := all[1].Replica
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known = map[string]savedMember{"old": {all[0].Self().Gossip, now.Add(-forgetAfter - time.Second)}, "new": {all[0].Self().Gossip, now}}
	for i := range maxKnown + 5 {
		r.known[fmt.Sprintf("n%d", i)] = savedMember{all[0].Self().Gossip, now.Add(-time.Minute)}
	}
	r.pruneLocked(now)
	if _, ok := r.known["old"]; ok || len(r.known) != maxKnown {
		t.Errorf("%d remembered, old: %v", len(r.known), ok)
	}
	if _, ok := r.known["new"]; !ok {
		t.Error("forgot the newest")
	}
	r.known = map[string]savedMember{}
}

// heardOut returns when all have read what a replica has sent them so far.
func (g *group) heardOut(from *peer, all []*peer) {
	g.t.Helper()
	for _, to := range all {
		if to != from {
			eventually.NoError(g.t, from.cfg.Name+" is received", func() error {
				_, err := from.gossip.Load().Ping(to.cfg.Name, net.UDPAddrFromAddrPort(to.Self().Gossip))
				return err
			})
		}
	}
}

func TestRotation(t *testing.T) { //nolint:gocyclo // one long tale
	g := newGroup(t)
	g.tune = func(c *memberlist.Config) {
		steady(c)
		c.DisableTcpPings = true // one that is read late would be in a key that is gone
	}
	var all []*peer
	for i := range 3 {
		cfg := g.config(fmt.Sprintf("r%d", i), fmt.Sprintf("127.0.0.%d", 10+i))
		if i > 0 {
			cfg.Seeds = []string{all[0].Self().Gossip.String()}
			if err := copyFile(filepath.Join(g.dir, "r0.keys"), cfg.KeyFile); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, g.start(cfg))
	}
	for _, p := range all {
		g.eventually(func() bool { return len(p.Members()) == 2 }, "joined")
	}
	g.pushed(all[0], all[1], 900)
	g.pushed(all[0], all[2], 901)

	stop, pushed := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for ; ; n++ {
			select {
			case <-stop:
				pushed <- n
				return
			case <-time.After(time.Millisecond):
				all[0].Push(testRoute(n%500, fmt.Sprint(1000+n)))
			}
		}
	}()
	ctx := t.Context()
	old, key := all[0].Keys()[0], NewKey()
	id, err := KeyID(key)
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	must(all[0].AddKey(ctx, key))
	if err := all[0].UseKey(ctx, id); err == nil || !strings.Contains(err.Error(), "does not hold it yet") {
		t.Errorf("used before the others hold it: %v", err)
	}
	must(all[1].AddKey(ctx, key))
	must(all[2].AddKey(ctx, key))
	must(all[2].AddKey(ctx, key)) // safe to repeat
	for _, p := range all {
		g.eventually(func() bool { return p.UseKey(ctx, id) == nil }, "all are known to hold it")
		if p == all[0] {
			if err := p.RemoveKey(ctx, old); err == nil {
				t.Error("removed what others use")
			}
		}
	}
	for _, p := range all {
		g.heardOut(p, all)
	}
	for _, p := range all {
		g.eventually(func() bool { return p.RemoveKey(ctx, old) == nil }, "no member is known to use it")
		if !slices.Equal(p.Keys(), []string{id}) {
			t.Errorf("keys: %v, want %v", p.Keys(), id)
		}
	}
	g.eventually(func() bool {
		ok := true
		for _, p := range all {
			for _, m := range p.Members() {
				ok = ok && slices.Equal(m.Keys, []string{id})
			}
		}
		return ok
	}, "all know that only the new one is left")
	close(stop)
	last := <-pushed
	for n := max(0, last-500); n < last; n++ {
		for _, p := range all[1:] {
			g.knows(p, testRoute(n%500, "").ID, fmt.Sprint(1000+n))
		}
	}
	for _, p := range all {
		if count(t, p, "lost_total") != 0 || len(p.Members()) != 2 {
			t.Errorf("%s: lost %v, members %v", p.cfg.Name, count(t, p, "lost_total"), p.Members())
		}
		if err := p.RemoveKey(ctx, id); err == nil {
			t.Error("removed the one in use")
		}
		if n := count(t, p, "gossip_refused_total", gossipKey); n != 0 {
			t.Errorf("%s refused %v times for the key", p.cfg.Name, n)
		}
	}
	keys, err := readKeys(all[1].cfg.KeyFile)
	if err != nil || len(keys) != 1 || keyID(keys[0]) != id {
		t.Errorf("file: %d keys, %v", len(keys), err)
	}
}
