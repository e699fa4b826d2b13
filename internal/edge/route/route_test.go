package route

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func TestMain(m *testing.M) { eventually.LeaveNoGoroutines(m) }

// object makes a running sandbox at a version.
func object(name string, uid types.UID, version int) *agents.Sandbox {
	started := metav1.Unix(1000, 0)
	return &agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: uid, ResourceVersion: strconv.Itoa(version)},
		Spec:       agents.SandboxSpec{},
		Status: agents.SandboxStatus{
			PodIPs:     []string{addressOf(uid)},
			Conditions: []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}},
			Barchan:    &agents.BarchanStatus{StartedAt: &started},
		},
	}
}

// addressOf gives each sandbox an address of its own.
func addressOf(uid types.UID) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(uid))
	return netip.AddrFrom4([4]byte{10, byte(h.Sum32() >> 16), byte(h.Sum32() >> 8), byte(h.Sum32())}).String()
}

func paused(s *agents.Sandbox) *agents.Sandbox {
	s.Spec.OperatingMode = agents.ModeSuspended
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionSuspended, Status: metav1.ConditionTrue}}
	return s
}

func dying(s *agents.Sandbox) *agents.Sandbox {
	now := metav1.Now()
	s.DeletionTimestamp = &now
	return s
}

func TestFromSandbox(t *testing.T) {
	no := false
	s := object("a", "u", 5)
	s.Spec.Barchan = &agents.BarchanSpec{
		Wake:   &agents.WakePolicy{OnTraffic: true, TimeoutSeconds: 7},
		Access: &agents.AccessPolicy{PublicTraffic: &no, MaskRequestHost: "h:${PORT}"},
	}
	r, keep := FromSandbox(s)
	want := Route{
		ID: sandbox.IDOf("u"), Namespace: "ns", Name: "a", UID: "u", State: sandbox.Running, Address: r.Address,
		Access:   Access{Secure: true, MaskRequestHost: "h:${PORT}"},
		Wake:     Wake{OnTraffic: true, Timeout: 7 * time.Second},
		EpochKey: r.EpochKey, ResourceVersion: "5",
	}
	if r != want || !keep || r.Address.String() != addressOf("u") || !r.Reachable() {
		t.Errorf("got %+v, %v", r, keep)
	}
	if plain, _ := FromSandbox(object("a", "u", 1)); !plain.Access.PublicTraffic {
		t.Error("without a policy, traffic is not public")
	}
	for name, c := range map[string]struct {
		s               *agents.Sandbox
		keep, reachable bool
	}{
		"paused":      {paused(object("a", "u", 1)), true, false},
		"dying":       {dying(object("a", "u", 1)), false, false},
		"no address":  {&agents.Sandbox{}, true, false},
		"bad address": {func() *agents.Sandbox { s := object("a", "u", 1); s.Status.PodIPs[0] = "x"; return s }(), true, false},
	} {
		if r, keep := FromSandbox(c.s); keep != c.keep || r.Reachable() != c.reachable {
			t.Errorf("%s: keep %v, reachable %v", name, keep, r.Reachable())
		}
	}
}

func TestEpochKeyChangesWithEachEpoch(t *testing.T) {
	key := func(change func(*agents.Sandbox)) string {
		s := object("a", "u", 1)
		change(s)
		r, _ := FromSandbox(s)
		return r.EpochKey
	}
	later := metav1.Unix(2000, 0)
	first := key(func(*agents.Sandbox) {})
	if key(func(s *agents.Sandbox) { s.ResourceVersion = "9" }) != first {
		t.Error("a mere version makes a new life")
	}
	for name, change := range map[string]func(*agents.Sandbox){
		"uid":     func(s *agents.Sandbox) { s.UID = "other" },
		"address": func(s *agents.Sandbox) { s.Status.PodIPs[0] = "10.0.0.8" },
		"start":   func(s *agents.Sandbox) { s.Status.Barchan.StartedAt = &later },
	} {
		if key(change) == first {
			t.Errorf("%s does not make a new life", name)
		}
	}
}

// TestStaleWriters plays the tales that routes elsewhere came to grief by.
func TestStaleWriters(t *testing.T) {
	id := sandbox.IDOf("u")
	for name, c := range map[string]struct {
		play func(*Table)
		want string // the version that is left; empty: no route
	}{
		"older upsert":                {func(x *Table) { x.Apply(object("a", "u", 10)); x.Apply(object("a", "u", 9)) }, "10"},
		"numbers, not strings":        {func(x *Table) { x.Apply(object("a", "u", 9)); x.Apply(object("a", "u", 10)) }, "10"},
		"same version":                {func(x *Table) { x.Apply(object("a", "u", 5)); x.Apply(paused(object("a", "u", 5))) }, "5"},
		"older delete":                {func(x *Table) { x.Apply(object("a", "u", 10)); x.Delete(id, "9") }, "10"},
		"delete of that version":      {func(x *Table) { x.Apply(object("a", "u", 10)); x.Delete(id, "10") }, ""},
		"resurrection":                {func(x *Table) { x.Apply(object("a", "u", 5)); x.Delete(id, "8"); x.Apply(object("a", "u", 7)) }, ""},
		"delete before all":           {func(x *Table) { x.Delete(id, "8"); x.Apply(object("a", "u", 8)) }, ""},
		"truth after a delete":        {func(x *Table) { x.Delete(id, "8"); x.Apply(object("a", "u", 9)) }, "9"},
		"dying, then late status":     {func(x *Table) { x.Apply(dying(object("a", "u", 5))); x.Apply(dying(object("a", "u", 6))) }, ""},
		"gone is final":               {func(x *Table) { x.ApplyDelete(object("a", "u", 5)); x.Apply(object("a", "u", 6)) }, ""},
		"gone by a stale view":        {func(x *Table) { x.Apply(object("a", "u", 9)); x.ApplyDelete(object("a", "u", 5)) }, ""},
		"paused stays":                {func(x *Table) { x.Apply(object("a", "u", 5)); x.Apply(paused(object("a", "u", 6))) }, "6"},
		"no version":                  {func(x *Table) { s := object("a", "u", 5); s.ResourceVersion = ""; x.Apply(s) }, ""},
		"a version that is a word":    {func(x *Table) { s := object("a", "u", 5); s.ResourceVersion = "0x9"; x.Apply(s) }, ""},
		"delete without version":      {func(x *Table) { x.Apply(object("a", "u", 5)); x.Delete(id, "") }, "5"},
		"name reused":                 {func(x *Table) { x.Apply(object("a", "u", 5)); x.Apply(object("a", "v", 6)) }, ""},
		"name reused, delivered late": {func(x *Table) { x.Apply(object("a", "v", 6)); x.Apply(object("a", "u", 5)) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			x := NewTable()
			c.play(x)
			e, ok := look(x, id)
			if ok != (c.want != "") || e.ResourceVersion != c.want {
				t.Errorf("left %v %q, want %q", ok, e.ResourceVersion, c.want)
			}
		})
	}
}

func TestNames(t *testing.T) {
	x := NewTable()
	x.Apply(object("a", "u", 5))
	x.Apply(object("a", "v", 6))
	x.ApplyDelete(object("a", "u", 7)) // delivered after the new one
	if id, ok := x.LookupName("ns", "a"); !ok || id != sandbox.IDOf("v") || x.Len() != 1 {
		t.Errorf("name leads to %q, %v; %d routes", id, ok, x.Len())
	}
	x.ApplyDelete(object("a", "v", 8))
	if id, ok := x.LookupName("ns", "a"); ok || x.Len() != 0 {
		t.Errorf("name of a dead sandbox leads to %q", id)
	}
}

func TestEpoch(t *testing.T) {
	x := NewTable()
	x.Apply(object("a", "u", 1))
	e, _ := look(x, sandbox.IDOf("u"))
	ends := 0
	e.Epoch.OnEnd(func() { ends++ })
	x.Apply(object("a", "u", 2))
	again, _ := look(x, sandbox.IDOf("u"))
	if again.Epoch != e.Epoch || e.Epoch.Ended() {
		t.Fatal("a new version alone ended the epoch")
	}
	<-e.Changed
	x.Apply(paused(object("a", "u", 3)))
	paused, _ := look(x, sandbox.IDOf("u"))
	if !e.Epoch.Ended() || ends != 1 || !paused.Epoch.Ended() {
		t.Fatal("pausing did not end the epoch")
	}
	x.Apply(object("a", "u", 4))
	back, _ := look(x, sandbox.IDOf("u"))
	if back.Epoch == e.Epoch || back.Epoch.Ended() {
		t.Fatal("resuming did not begin a life, though the key is the same")
	}
	x.Apply(dying(object("a", "u", 5)))
	<-back.Epoch.Done()
	<-back.Changed
	back.Epoch.OnEnd(func() { ends++ })
	if ends != 2 {
		t.Error("OnEnd of an ended life did not run")
	}
}

func TestTombstonesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := NewTable()
		id := sandbox.IDOf("u")
		x.Delete(id, "8")
		time.Sleep(tombstoneTTL - time.Second)
		if x.Apply(object("a", "u", 8)) {
			t.Fatal("the tombstone did not hold to its end")
		}
		x.Delete(id, "9") // renews it
		time.Sleep(tombstoneTTL - time.Second)
		if x.Apply(object("a", "u", 9)) {
			t.Fatal("the renewed tombstone did not hold")
		}
		time.Sleep(2 * time.Second)
		x.Delete("other", "1") // any writer sweeps
		x.mu.Lock()
		n := len(x.graves.stones)
		x.mu.Unlock()
		if n != 1 {
			t.Errorf("%d tombstones are left, want 1", n)
		}
	})
}

// Issue 11: a request to a sandbox that has ended gets the reason.
func TestTombstoneSaysWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := NewTable()
		id, ns := sandbox.IDOf("u"), object("a", "u", 1).Namespace
		x.Apply(object("a", "u", 1))
		if why := x.Ended(ns, id); why != "" {
			t.Errorf("of one that lives: %q", why)
		}
		failed := object("a", "u", 2)
		failed.Status.Conditions = []metav1.Condition{{Type: agents.ConditionFinished, Status: metav1.ConditionTrue, Message: "out of memory"}}
		x.Apply(failed)
		killed := failed.DeepCopy()
		killed.ResourceVersion, killed.Status.Conditions, killed.DeletionTimestamp = "3", nil, new(metav1.Now())
		x.Apply(killed)
		x.ApplyDelete(killed)
		x.Delete(id, "4")
		if why := x.Ended(ns, id); why != "out of memory" {
			t.Errorf("the first reason: %q", why)
		}
		if why := x.Ended("other", id); why != "" {
			t.Errorf("for another tenant: %q", why)
		}
		x.Apply(object("b", "v", 5))
		x.Delete(sandbox.IDOf("v"), "6") // a peer, without a reason
		killed.UID, killed.ResourceVersion = "v", "7"
		x.ApplyDelete(killed)
		if why := x.Ended(ns, sandbox.IDOf("v")); !strings.HasPrefix(why, "it was killed at ") {
			t.Errorf("learned later: %q", why)
		}
		time.Sleep(tombstoneTTL)
		if why := x.Ended(ns, id); why != "" {
			t.Errorf("after the tombstone's time: %q", why)
		}
	})
}

func TestTombstonesAreBounded(t *testing.T) {
	var g tombstones
	now := time.Now()
	for i := range 3 * maxTombstones {
		g.add(sandbox.ID(strconv.Itoa(i)), "1", false, end{}, now)
		g.add(sandbox.ID(strconv.Itoa(i)), "2", false, end{}, now.Add(time.Duration(i)))
		g.sweep(now)
	}
	if len(g.stones) > maxTombstones || len(g.order) > 3*maxTombstones {
		t.Errorf("%d tombstones, %d entries", len(g.stones), len(g.order))
	}
	if _, ok := g.stones[sandbox.ID(strconv.Itoa(3*maxTombstones-1))]; !ok {
		t.Error("the youngest tombstone was dropped")
	}
}

// event is one thing that happens to one of a few objects, as a writer applies it.
type event struct {
	uid     int
	version int
	what    int // upsert, pause, dying, delete by version, gone
}

func (e event) apply(x *Table) {
	uid := types.UID(strconv.Itoa(e.uid))
	s := object("n"+strconv.Itoa(e.uid), uid, e.version)
	switch e.what {
	case 0:
		x.Apply(s)
	case 1:
		x.Apply(paused(s))
	case 2:
		x.Apply(dying(s))
	case 3:
		x.Delete(sandbox.IDOf(uid), s.ResourceVersion)
	default:
		x.ApplyDelete(s)
	}
}

// model implements each rule, without snapshots, pages or locks.
type model map[int]*modelEntry

type modelEntry struct {
	version     int
	alive       bool
	state       sandbox.Phase
	stone       int // version of the tombstone; 0: none
	final       bool
	stoneExpire time.Time
}

func (m model) apply(e event, now time.Time) {
	x := m[e.uid]
	if x == nil {
		x = &modelEntry{}
		m[e.uid] = x
	}
	if !now.Before(x.stoneExpire) {
		x.stone, x.final = 0, false
	}
	remove := func() {
		if e.what == 4 && x.alive {
			x.stone = max(x.stone, x.version)
		}
		x.stone, x.final = max(x.stone, e.version), x.final || e.what == 4
		x.alive, x.stoneExpire = false, now.Add(tombstoneTTL)
	}
	switch {
	case e.what >= 4, e.what >= 2 && (!x.alive || e.version >= x.version):
		remove()
	case e.what >= 2:
	case x.final || e.version <= x.stone || (x.alive && e.version <= x.version):
	default:
		x.alive, x.version, x.stone = true, e.version, 0
		x.state = []sandbox.Phase{sandbox.Running, sandbox.Paused}[e.what]
	}
}

func (m model) check(t testing.TB, x *Table) {
	t.Helper()
	alive := 0
	for uid, want := range m {
		id := sandbox.IDOf(types.UID(strconv.Itoa(uid)))
		e, ok := look(x, id)
		named, byName := x.LookupName("ns", "n"+strconv.Itoa(uid))
		if ok != want.alive || byName != ok || (ok && named != id) {
			t.Fatalf("sandbox %d: found %v, by name %v %q; the model has %v", uid, ok, byName, named, want.alive)
		}
		if !ok {
			continue
		}
		alive++
		if e.ResourceVersion != strconv.Itoa(want.version) || e.State != want.state || e.Epoch.Ended() == e.Reachable() {
			t.Fatalf("sandbox %d: %+v, epoch ended %v; the model has %+v", uid, e.Route, e.Epoch.Ended(), *want)
		}
	}
	if x.Len() != alive {
		t.Fatalf("%d routes, model has %d", x.Len(), alive)
	}
	for range x.All() {
		alive--
	}
	if alive != 0 {
		t.Fatalf("All and Len differ by %d", alive)
	}
}

func TestTableAgainstModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for seed := range uint64(60) {
			rng := rand.New(rand.NewPCG(seed, 1))
			x, m := NewTable(), model{}
			for range 400 {
				e := event{uid: rng.IntN(6), version: 1 + rng.IntN(40), what: rng.IntN(9) % 5}
				e.apply(x)
				m.apply(e, time.Now())
				m.check(t, x)
				if rng.IntN(30) == 0 {
					time.Sleep(time.Duration(rng.Int64N(int64(tombstoneTTL))))
				}
			}
		}
	})
}

func FuzzTable(f *testing.F) {
	f.Add([]byte{0, 5, 0, 0, 6, 3, 0, 5, 0})
	f.Fuzz(func(t *testing.T, tape []byte) {
		x, m := NewTable(), model{}
		for ; len(tape) >= 3; tape = tape[3:] {
			e := event{uid: int(tape[0] % 8), version: 1 + int(tape[1]), what: int(tape[2] % 5)}
			e.apply(x)
			m.apply(e, time.Now())
		}
		m.check(t, x)
	})
}

// TestAnyOrder applies one history from three writers, in any order and more than once: the end
// must be the newest state.
func TestAnyOrder(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 2))
		var history []event
		dead := false
		for version := 1; version < 12 && !dead; version++ {
			what := rng.IntN(2)
			if dead = rng.IntN(8) == 0; dead {
				what = 2 + 2*rng.IntN(2)
			}
			history = append(history, event{uid: 1, version: version, what: what})
		}
		tape := append(append(append([]event(nil), history...), history...), history...)
		rng.Shuffle(len(tape), func(i, j int) { tape[i], tape[j] = tape[j], tape[i] })
		x := NewTable()
		for _, e := range tape {
			e.apply(x)
		}
		last := history[len(history)-1]
		e, ok := look(x, sandbox.IDOf("1"))
		if ok == dead || (ok && e.ResourceVersion != strconv.Itoa(last.version)) {
			t.Fatalf("seed %d: history %v, left %v %q", seed, history, ok, e.ResourceVersion)
		}
	}
}

func TestConcurrentWritersAndReaders(t *testing.T) {
	x := NewTable()
	var readers, writers sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		readers.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				id := sandbox.IDOf(types.UID(strconv.Itoa(i % 50)))
				if e, ok := look(x, id); ok && e.ID != id {
					t.Errorf("looked for %s, got %s", id, e.ID)
				}
				n := 0
				for range x.All() {
					n++
				}
			}
		})
	}
	for w := range 3 {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 3))
			for v := 1; v < 1500; v++ {
				event{uid: rng.IntN(50), version: v, what: rng.IntN(3)}.apply(x)
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
}

func TestSynced(t *testing.T) {
	x := NewTable()
	if x.Synced() {
		t.Error("an empty table is synced")
	}
	if x.MarkSynced(); !x.Synced() {
		t.Error("still not synced")
	}
}

func filled(b *testing.B, n int) (*Table, []sandbox.ID) {
	b.Helper()
	x := NewTable()
	ids := make([]sandbox.ID, n)
	for i := range n {
		s := object("n"+strconv.Itoa(i), types.UID(fmt.Sprintf("uid-%d", i)), i+1)
		x.Apply(s)
		ids[i] = sandbox.IDOf(s.UID)
	}
	rand.Shuffle(n, func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	// They lie one after the other, for those of requests are in the processor's cache as well.
	var all strings.Builder
	for _, id := range ids {
		all.WriteString(string(id))
	}
	for i, id := range ids {
		ids[i] = sandbox.ID(all.String()[i*len(id):][:len(id)])
	}
	return x, ids
}

// look is a copy of what a lookup finds; nothing of it is set where that is nothing.
func look(x *Table, id sandbox.ID) (e Entry, ok bool) {
	found, ok := x.Lookup(id)
	if ok {
		e = *found
	}
	return e, ok
}

// plainMap is what a lookup is measured against: one without concurrent writers.
type plainMap map[sandbox.ID]*record

func (m plainMap) Lookup(id sandbox.ID) (*Entry, bool) {
	rec, ok := m[id]
	if ok {
		return &rec.Entry, true
	}
	return nil, false
}

// BenchmarkLookup calls as the gateway does: behind an interface, and not through a method value,
// whose wrapper copies the whole answer once more.
func BenchmarkLookup(b *testing.B) {
	for _, n := range []int{100, 10_000, 100_000} {
		x, ids := filled(b, n)
		reference := make(plainMap, n)
		for _, id := range ids {
			rec := x.current.Load().byID.get(id)
			reference[rec.ID] = rec
		}
		for _, c := range []struct {
			name string
			in   interface {
				Lookup(id sandbox.ID) (*Entry, bool)
			}
		}{{"table", x}, {"map", reference}} {
			b.Run(fmt.Sprintf("%d/%s", n, c.name), func(b *testing.B) {
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					e, ok := c.in.Lookup(ids[i])
					if !ok || e.Epoch == nil {
						b.Fatal("not found")
					}
					if i++; i == len(ids) {
						i = 0
					}
				}
			})
		}
	}
}

func BenchmarkUpsert(b *testing.B) {
	version := 1_000_000_000
	for _, n := range []int{100, 10_000, 100_000} {
		x, ids := filled(b, n)
		routes := make([]Route, n)
		for i, id := range ids {
			e, _ := look(x, id)
			routes[i] = e.Route
		}
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				version++
				r := routes[version%n]
				r.ResourceVersion = strconv.Itoa(version)
				if !x.Upsert(r) {
					b.Fatal("refused")
				}
			}
		})
	}
}

// TestUnclaimedMembersHaveNoRoute: neither ID nor name leads to a spare member of a pool, whatever
// the order in which its versions arrive; its claim gives it a route, which nothing older takes.
func TestUnclaimedMembersHaveNoRoute(t *testing.T) {
	member := func(version int) *agents.Sandbox {
		s := object("a", "uid-a", version)
		s.Labels = map[string]string{agents.LabelWarmPoolSandbox: "pool"}
		return s
	}
	claimed := object("a", "uid-a", 7)
	id := sandbox.IDOf(claimed.UID)
	x := NewTable()
	for _, version := range []int{1, 2} {
		x.Apply(member(version))
		if _, ok := look(x, id); ok {
			t.Error("the ID of a spare member has a route")
		}
		if _, ok := x.LookupName(claimed.Namespace, claimed.Name); ok {
			t.Error("the name of a spare member has a route")
		}
	}
	x.Apply(claimed)
	for range 2 {
		e, ok := look(x, id)
		if !ok || !e.Reachable() {
			t.Errorf("the claimed one has route %+v, %v", e.Route, ok)
		}
		if e.Epoch.Ended() {
			t.Error("its life is over")
		}
		x.Apply(member(6)) // the watch lags behind
	}
}
