package route

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const absurd = "9999999999999999999999"

// synced returns a table whose watch has passed a version.
func synced(version int, objects ...*agents.Sandbox) *Table {
	x := NewTable()
	for _, s := range objects {
		x.Apply(s)
	}
	x.MarkSynced()
	x.Progress(strconv.Itoa(version))
	return x
}

func routeOf(s *agents.Sandbox) Route {
	r, _ := FromSandbox(s)
	return r
}

// hinted pushes a hint about an object into a table.
func hinted(x *Table, s *agents.Sandbox) bool {
	r, keep := FromSandbox(s)
	if !keep {
		return x.HintDelete(r.ID, r.ResourceVersion)
	}
	return x.Hint(r)
}

func with(s *agents.Sandbox, change func(*agents.Sandbox)) *agents.Sandbox {
	change(s)
	return s
}

// TestHints applies hints ahead of the watch, or behind it, or against it.
func TestHints(t *testing.T) {
	id := sandbox.IDOf("u")
	at := func(addr string) func(*agents.Sandbox) {
		return func(s *agents.Sandbox) { s.Status.PodIPs[0] = addr }
	}
	rename := func(s *agents.Sandbox) { s.Name = "b" }
	version := func(v string) func(*agents.Sandbox) {
		return func(s *agents.Sandbox) { s.ResourceVersion = v }
	}
	for name, c := range map[string]struct {
		known *agents.Sandbox // in truth, at version 5
		play  func(*Table)
		want  string // the version that lookups see; empty: no route
	}{
		"new":                       {nil, func(x *Table) { hinted(x, object("a", "u", 7)) }, "7"},
		"before sync":               {nil, func(x *Table) { *x = *NewTable(); hinted(x, object("a", "u", 7)) }, "7"},
		"the paused push":           {object("a", "u", 5), func(x *Table) { hinted(x, paused(object("a", "u", 7))); hinted(x, object("a", "u", 6)) }, "7"},
		"doubled":                   {object("a", "u", 5), func(x *Table) { hinted(x, object("a", "u", 7)); hinted(x, paused(object("a", "u", 7))) }, "7"},
		"stale by the watch":        {nil, func(x *Table) { hinted(x, object("a", "u", 5)) }, ""},
		"stale by the object":       {object("a", "u", 5), func(x *Table) { x.Apply(object("a", "u", 9)); hinted(x, object("a", "u", 8)) }, "9"},
		"truth passes":              {object("a", "u", 5), func(x *Table) { hinted(x, object("a", "u", 7)); x.Apply(object("a", "u", 8)) }, "8"},
		"truth confirms":            {object("a", "u", 5), func(x *Table) { hinted(x, object("a", "u", 7)); x.Apply(object("a", "u", 7)) }, "7"},
		"truth is behind":           {object("a", "u", 5), func(x *Table) { hinted(x, object("a", "u", 7)); x.Apply(object("a", "u", 6)) }, "7"},
		"bookmark":                  {object("a", "u", 5), func(x *Table) { hinted(x, object("a", "u", 7)); x.Progress("7") }, "5"},
		"bookmark before":           {object("a", "u", 5), func(x *Table) { hinted(x, object("a", "u", 7)); x.Progress("6") }, "7"},
		"bookmark backwards":        {object("a", "u", 5), func(x *Table) { x.Progress("9"); x.Progress("6"); hinted(x, object("a", "u", 8)) }, "5"},
		"bookmark that is a word":   {object("a", "u", 5), func(x *Table) { x.Progress("soon"); hinted(x, object("a", "u", 7)) }, "7"},
		"delete":                    {object("a", "u", 5), func(x *Table) { x.HintDelete(id, "7") }, ""},
		"delete, then older":        {object("a", "u", 5), func(x *Table) { x.HintDelete(id, "7"); hinted(x, object("a", "u", 6)) }, ""},
		"delete of that version":    {object("a", "u", 5), func(x *Table) { hinted(x, object("a", "u", 7)); x.HintDelete(id, "7") }, ""},
		"delete, then truth older":  {object("a", "u", 5), func(x *Table) { x.HintDelete(id, "7"); x.Apply(object("a", "u", 6)) }, ""},
		"delete of the past":        {object("a", "u", 5), func(x *Table) { x.HintDelete(id, "5") }, "5"},
		"delete that did not be":    {object("a", "u", 5), func(x *Table) { x.HintDelete(id, "7"); x.Progress("8") }, "5"},
		"delete, then truth newer":  {object("a", "u", 5), func(x *Table) { x.HintDelete(id, "7"); x.Apply(object("a", "u", 8)) }, "8"},
		"delete before all":         {nil, func(x *Table) { x.HintDelete(id, "7"); hinted(x, object("a", "u", 6)) }, ""},
		"the resurrection":          {object("a", "u", 5), func(x *Table) { x.Delete(id, "8"); x.Apply(object("a", "u", 7)); hinted(x, object("a", "u", 7)) }, ""},
		"resurrection of the gone":  {object("a", "u", 5), func(x *Table) { x.ApplyDelete(object("a", "u", 6)); hinted(x, object("a", "u", 99)) }, ""},
		"gone ends the hint":        {nil, func(x *Table) { hinted(x, object("a", "u", 99)); x.ApplyDelete(object("a", "u", 6)) }, ""},
		"dying ends the hint":       {nil, func(x *Table) { hinted(x, object("a", "u", 7)); x.Apply(dying(object("a", "u", 8))) }, ""},
		"recycled name":             {object("a", "u", 5), func(x *Table) { hinted(x, object("a", "v", 7)) }, "5"},
		"no version":                {nil, func(x *Table) { hinted(x, with(object("a", "u", 7), version(""))) }, ""},
		"a version that is a word":  {nil, func(x *Table) { hinted(x, with(object("a", "u", 7), version("0x9"))) }, ""},
		"an ID that is not its own": {nil, func(x *Table) { r := routeOf(object("a", "v", 7)); r.ID = id; x.Hint(r) }, ""},
		"another name":              {object("a", "u", 5), func(x *Table) { hinted(x, with(object("a", "u", 7), rename)) }, "5"},
		"another name in truth":     {nil, func(x *Table) { hinted(x, with(object("a", "u", 7), rename)); x.Apply(object("a", "u", 6)) }, "6"},
		"loopback":                  {nil, func(x *Table) { hinted(x, with(object("a", "u", 7), at("127.0.0.1"))) }, ""},
		"link-local":                {nil, func(x *Table) { hinted(x, with(object("a", "u", 7), at("169.254.169.254"))) }, ""},
		"an address that is taken":  {object("b", "v", 5), func(x *Table) { hinted(x, with(object("a", "u", 7), at(addressOf("v")))) }, ""},
		"an address taken later": {nil, func(x *Table) {
			hinted(x, with(object("a", "u", 9), at(addressOf("v"))))
			x.Apply(object("b", "v", 6))
		}, ""},
		"an address of two hints": {nil, func(x *Table) {
			hinted(x, with(object("a", "u", 9), at(addressOf("v"))))
			hinted(x, object("b", "v", 8))
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			x := synced(5)
			if c.known != nil {
				x = synced(5, c.known)
			}
			c.play(x)
			e, ok := look(x, id)
			if ok != (c.want != "") || e.ResourceVersion != c.want {
				t.Errorf("left %v %q, want %q", ok, e.ResourceVersion, c.want)
			}
		})
	}
}

// TestForgedVersion: a version that no watch will ever pass holds for a bounded time, with no one
// writing, and not again.
func TestForgedVersion(t *testing.T) {
	forged := func(s *agents.Sandbox) *agents.Sandbox { s.ResourceVersion = absurd; return s }
	for name, c := range map[string]struct{ forged, known *agents.Sandbox }{
		"upsert":         {forged(paused(object("a", "u", 0))), object("a", "u", 5)},
		"delete":         {forged(dying(object("a", "u", 0))), object("a", "u", 5)},
		"of the unknown": {forged(object("a", "u", 0)), nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				x, id := synced(5), sandbox.IDOf("u")
				if c.known != nil {
					x = synced(5, c.known)
				}
				before, _ := look(x, id)
				hinted(x, c.forged)
				time.Sleep(HintTTL - time.Nanosecond)
				if e, _ := look(x, id); e.Route == before.Route {
					t.Error("the hint did not stand")
				}
				hinted(x, c.forged) // once more: this does not renew it
				time.Sleep(time.Nanosecond)
				shown := func(when string) {
					t.Helper()
					e, ok := look(x, id)
					byName, named := x.LookupName("ns", "a")
					n := 0
					for range x.All() {
						n++
					}
					if e.Route != before.Route || ok != (c.known != nil) || named != ok || named && byName != id || n != len(before.ID)/20 {
						t.Errorf("%s: %v %+v, by name %v, %d routes", when, ok, e.Route, named, n)
					}
				}
				shown("after its time")
				x.Progress("6")
				shown("after a write")
				hinted(x, c.forged)
				shown("forged again")
				if e, ok := look(x, id); ok {
					select {
					case <-e.Changed:
						t.Error("who waits for a change would wait in a circle")
					default:
					}
				}
				x.Apply(object("a", "u", 9))
				if e, _ := look(x, id); e.ResourceVersion != "9" || e.Hint {
					t.Errorf("the truth comes to nothing: %+v", e)
				}
			})
		})
	}
}

// TestHintsAreBelievedAgain: a hint that came to nothing costs its sandbox hints for a while only.
func TestHintsAreBelievedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, wait := range map[string]func(*Table){
			"the watch has passed it": func(x *Table) { x.Progress("20") },
			"the object has":          func(x *Table) { x.Apply(object("a", "u", 20)) },
			"time has":                func(*Table) { time.Sleep(disbeliefTTL) },
		} {
			x := synced(5, object("a", "u", 5))
			hinted(x, paused(object("a", "u", 10)))
			time.Sleep(HintTTL)
			if hinted(x, paused(object("a", "u", 21))) {
				t.Errorf("%s: a hint is taken after one that came to nothing", name)
			}
			wait(x)
			if !hinted(x, paused(object("a", "u", 22))) {
				t.Errorf("%s: hints are not taken any more", name)
			}
		}
	})
}

// TestHintsDoNotCut: a hint ends no connections, and an epoch that it began ends with it.
func TestHintsDoNotCut(t *testing.T) {
	id := sandbox.IDOf("u")
	for name, s := range map[string]*agents.Sandbox{
		"delete": dying(object("a", "u", 7)), "pause": paused(object("a", "u", 7)),
		"move":  with(object("a", "u", 7), func(s *agents.Sandbox) { s.Status.PodIPs[0] = "10.9.9.9" }),
		"touch": object("a", "u", 7),
	} {
		x := synced(5, object("a", "u", 5))
		flowing, _ := look(x, id)
		hinted(x, s)
		select {
		case <-flowing.Changed:
		default:
			t.Errorf("%s: waiters are not notified of the hint", name)
		}
		hint, _ := look(x, id)
		x.Progress("8") // it was not so
		if flowing.Epoch.Ended() {
			t.Errorf("%s: a hint cut a living sandbox off", name)
		}
		if hint.Epoch != nil && hint.Epoch != flowing.Epoch && !hint.Epoch.Ended() {
			t.Errorf("%s: the epoch of a hint continues without it", name)
		}
		if now, _ := look(x, id); now.Epoch != flowing.Epoch {
			t.Errorf("%s: the truth has another life than before", name)
		}
	}
}

// TestConfirmedHint keeps the epoch that the hint began, until a base record ends it.
func TestConfirmedHint(t *testing.T) {
	x, id := synced(5), sandbox.IDOf("u")
	hinted(x, object("a", "u", 7))
	ahead, _ := look(x, id)
	x.Apply(object("a", "u", 7))
	if e, _ := look(x, id); !ahead.Hint || e.Hint || e.Epoch != ahead.Epoch || e.Epoch.Ended() {
		t.Error("the confirmation of a hint ended its life")
	}
	hinted(x, object("a", "u", 9))
	x.Apply(paused(object("a", "u", 8)))
	if e, _ := look(x, id); !ahead.Epoch.Ended() || e.ResourceVersion != "9" || e.Epoch.Ended() {
		t.Errorf("paused by the truth and awake by a newer hint: %+v, old epoch ended %v", e, ahead.Epoch.Ended())
	}
	x.HintDelete(id, "10")
	if x.ApplyDelete(object("a", "u", 8)); x.Len() != 0 {
		t.Errorf("%d routes are left", x.Len())
	}
}

// TestForgedEpoch: a hint that names the epoch of another address does not get its connections, nor
// give it its own.
func TestForgedEpoch(t *testing.T) {
	id := sandbox.IDOf("u")
	forged := routeOf(object("a", "u", 7))
	forged.Address = netip.MustParseAddr("10.9.9.9")
	x := synced(5, object("a", "u", 5))
	truth, _ := look(x, id)
	x.Hint(forged)
	if e, _ := look(x, id); e.Epoch == truth.Epoch {
		t.Error("a forged address has the epoch of the true one")
	}
	x = synced(5)
	x.Hint(forged)
	e, _ := look(x, id)
	x.Apply(object("a", "u", 7))
	if now, _ := look(x, id); now.Epoch == e.Epoch || !e.Epoch.Ended() {
		t.Error("the true address has the epoch of a forged one")
	}
}

// TestHintsDoNotOpenDoors: what the truth keeps private, a hint cannot make public.
func TestHintsDoNotOpenDoors(t *testing.T) {
	closed := object("a", "u", 5)
	no := false
	closed.Spec.Barchan = &agents.BarchanSpec{Access: &agents.AccessPolicy{PublicTraffic: &no}}
	x := synced(5, closed)
	open := routeOf(object("a", "u", 7))
	open.Access.Secure, open.Wake = false, Wake{OnTraffic: true}
	x.Hint(open)
	e, _ := look(x, open.ID)
	if e.ResourceVersion != "7" || e.Access.PublicTraffic || !e.Access.Secure || e.Wake.OnTraffic {
		t.Errorf("a hint opened %+v", e)
	}
}

// TestHintedNames: a hint uses a free name, and never takes a name away.
func TestHintedNames(t *testing.T) {
	is := func(x *Table, want types.UID) {
		t.Helper()
		if id, ok := x.LookupName("ns", "a"); ok != (want != "") || ok && id != sandbox.IDOf(want) {
			t.Errorf("name leads to %q, %v; want that of %q", id, ok, want)
		}
	}
	x := synced(5)
	hinted(x, object("a", "u", 7))
	is(x, "u")
	x.Progress("8")
	is(x, "")
	x.Apply(object("a", "u", 9))
	hinted(x, object("a", "v", 12))
	is(x, "u")
	x.HintDelete(sandbox.IDOf("u"), "11")
	if x.Len() != 1 {
		t.Errorf("%d routes, want that of the other hint", x.Len())
	}
	is(x, "") // the holder of the name is hidden; no one else has it until a base record does
	x.Apply(object("a", "v", 12))
	is(x, "v")
	if x.Len() != 1 {
		t.Errorf("%d routes, want 1", x.Len())
	}
	x = synced(5)
	hinted(x, object("a", "u", 9))
	x.Apply(object("a", "v", 7))
	is(x, "v")
	x.ApplyDelete(object("a", "v", 8))
	x.Progress("9")
	is(x, "")
}

// TestAddressHasOneOwner: a table without the end of a sandbox does not lead to the new holder of its
// address now.
func TestAddressHasOneOwner(t *testing.T) {
	same := func(s *agents.Sandbox) *agents.Sandbox { s.Status.PodIPs[0] = "10.1.1.1"; return s }
	x := NewTable()
	x.Apply(same(object("a", "u", 5)))
	old, _ := look(x, sandbox.IDOf("u"))
	x.Apply(same(object("b", "v", 7)))
	if e, ok := look(x, sandbox.IDOf("u")); !ok || e.Reachable() || !old.Epoch.Ended() {
		t.Errorf("the address leads to two: %+v, epoch ended %v", e.Route, old.Epoch.Ended())
	}
	x.Apply(same(object("a", "u", 6)))
	if e, _ := look(x, sandbox.IDOf("u")); e.ResourceVersion != "6" || e.Reachable() {
		t.Errorf("an older claim takes the address: %+v", e.Route)
	}
	x.ApplyDelete(same(object("a", "u", 8)))
	if e, ok := look(x, sandbox.IDOf("v")); !ok || !e.Reachable() {
		t.Error("the end of who had it before takes the address from its owner")
	}
	x.ApplyDelete(same(object("b", "v", 9)))
	x.Apply(same(object("c", "w", 10)))
	if e, _ := look(x, sandbox.IDOf("w")); !e.Reachable() {
		t.Error("a free address is not to be had")
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if n := len(x.held); n != 1 {
		t.Errorf("%d addresses are held, want 1", n)
	}
}

func TestHintsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := synced(1)
		check := func(when string) {
			t.Helper()
			x.mu.Lock()
			defer x.mu.Unlock()
			h := &x.hints
			if len(h.of) > maxHints || len(h.byVersion) != len(h.of) || len(h.holder) > len(h.of) || len(h.standing)+len(h.void) > 6*maxHints {
				t.Errorf("%s: %d hints, %d by version, %d addresses, %d and %d in order", when, len(h.of), len(h.byVersion), len(h.holder), len(h.standing), len(h.void))
			}
		}
		for i := range 5 * maxHints / 2 {
			uid := types.UID(strconv.Itoa(i))
			r := Route{ID: sandbox.IDOf(uid), UID: uid, Namespace: "ns", Name: string(uid), State: sandbox.Running, ResourceVersion: strconv.Itoa(10 + i)}
			r.Address = netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
			if !x.Hint(r) {
				t.Fatalf("hint %d is refused", i)
			}
		}
		check("full")
		if x.Len() != maxHints {
			t.Errorf("%d routes, want %d", x.Len(), maxHints)
		}
		if _, ok := look(x, sandbox.IDOf(types.UID(strconv.Itoa(5*maxHints/2-1)))); !ok {
			t.Error("the youngest hint was dropped")
		}
		time.Sleep(HintTTL)
		x.HintDelete("someone", "1000000")
		check("all void")
		if x.Len() != 0 {
			t.Errorf("%d hints stand", x.Len())
		}
		time.Sleep(disbeliefTTL)
		x.HintDelete("someone", "1000001")
		check("all forgotten")
		x.mu.Lock()
		defer x.mu.Unlock()
		if len(x.hints.of) != 1 {
			t.Errorf("%d hints are left, want 1", len(x.hints.of))
		}
	})
}

// simulation is what truly happens to a few sandboxes that share names and addresses.
type simulation struct {
	rng     *rand.Rand
	version int
	lives   int
	named   [4]*agents.Sandbox
	tales   []tale
}

// tale is one version of one object.
type tale struct {
	s    *agents.Sandbox
	gone bool
}

// happen continues the history of one sandbox.
func (w *simulation) happen() {
	w.version += 1 + w.rng.IntN(3)
	i := w.rng.IntN(len(w.named))
	s := w.named[i]
	switch {
	case s == nil:
		w.lives++
		s = object("n"+strconv.Itoa(i), types.UID(fmt.Sprintf("u%d", w.lives)), 0)
		w.start(s)
	case s.DeletionTimestamp != nil:
		s = s.DeepCopy()
		s.ResourceVersion = strconv.Itoa(w.version)
		w.named[i] = nil
		w.tales = append(w.tales, tale{s, true})
		return
	default:
		s = s.DeepCopy()
		switch w.rng.IntN(5) {
		case 0:
			dying(s)
		case 1:
			paused(s)
		case 2, 3:
			w.start(s)
		}
	}
	s.ResourceVersion = strconv.Itoa(w.version)
	w.named[i] = s
	w.tales = append(w.tales, tale{s, false})
}

// start has a sandbox run, mostly at a free address and at times where it was.
func (w *simulation) start(s *agents.Sandbox) {
	s.Spec.OperatingMode = ""
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	began := metav1.Unix(int64(w.version), 0)
	s.Status.Barchan.StartedAt = &began
	for {
		addr := fmt.Sprintf("10.0.0.%d", 1+w.rng.IntN(len(w.named)+2))
		free := true
		for _, other := range w.named {
			free = free && (other == nil || other.UID == s.UID || other.Status.PodIPs[0] != addr)
		}
		if free {
			s.Status.PodIPs = []string{addr}
			return
		}
	}
}

func (w tale) apply(x *Table) {
	if w.gone {
		x.ApplyDelete(w.s)
	} else {
		x.Apply(w.s)
	}
}

// plane is a replica: a table, and one beside it without hints.
type plane struct {
	w           *simulation
	rng         *rand.Rand
	table, base *Table
	seen        int // events that the watch has delivered
	hints       map[sandbox.ID]time.Time
}

// boot begins with a list, in any order.
func (p *plane) boot() {
	p.table, p.base, p.hints = NewTable(), NewTable(), map[sandbox.ID]time.Time{}
	last := map[types.UID]tale{}
	for _, w := range p.w.tales[:p.seen] {
		last[w.s.UID] = w
	}
	for _, w := range last { // a map's order is any
		if !w.gone {
			p.both(w.apply)
		}
		if p.rng.IntN(4) == 0 {
			p.push()
		}
	}
	p.both((*Table).MarkSynced)
}

func (p *plane) both(do func(*Table)) {
	do(p.table)
	do(p.base)
}

// step lets one of the writers write.
func (p *plane) step() {
	switch n := p.rng.IntN(40); {
	case n < 12 && p.seen < len(p.w.tales): // the watch
		w := p.w.tales[p.seen]
		p.seen++
		p.both(w.apply)
		p.both(func(x *Table) { x.Progress(w.s.ResourceVersion) })
	case n < 14 && p.seen == len(p.w.tales): // a bookmark
		p.both(func(x *Table) { x.Progress(strconv.Itoa(p.w.version)) })
	case n < 18 && p.seen < len(p.w.tales): // a writer of this replica is ahead of its watch
		ahead := p.seen + p.rng.IntN(min(4, len(p.w.tales)-p.seen))
		p.both(p.w.tales[ahead].apply)
	case n < 32:
		p.push()
	case n < 36:
		p.forge()
	case n < 37:
		time.Sleep(time.Duration(p.rng.Int64N(int64(2 * HintTTL))))
	case n < 38:
		p.boot()
	default:
		p.w.happen()
	}
}

// push sends a hint of any time: early, late, twice, out of order.
func (p *plane) push() {
	if len(p.w.tales) == 0 {
		return
	}
	w := p.w.tales[len(p.w.tales)-1-p.rng.IntN(min(12, len(p.w.tales)))]
	r, keep := FromSandbox(w.s)
	if keep = keep && !w.gone; keep {
		p.hint(r.ID, func() bool { return p.table.Hint(r) })
	} else {
		p.hint(r.ID, func() bool { return p.table.HintDelete(r.ID, r.ResourceVersion) })
	}
}

// forge sends false hints.
func (p *plane) forge() {
	if len(p.w.tales) == 0 {
		return
	}
	r, _ := FromSandbox(p.w.tales[p.rng.IntN(len(p.w.tales))].s)
	r.ResourceVersion = []string{absurd, strconv.Itoa(p.w.version + 3), "18446744073709551616"}[p.rng.IntN(3)]
	switch p.rng.IntN(4) {
	case 0:
		p.hint(r.ID, func() bool { return p.table.HintDelete(r.ID, r.ResourceVersion) })
		return
	case 1:
		r.Address = netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + p.rng.IntN(6))})
	case 2:
		r.State = []sandbox.Phase{sandbox.Running, sandbox.Paused, sandbox.Pausing}[p.rng.IntN(3)]
	default:
		r.UID = types.UID(fmt.Sprintf("forged%d", p.rng.IntN(5)))
		r.ID = sandbox.IDOf(r.UID)
	}
	p.hint(r.ID, func() bool { return p.table.Hint(r) })
}

// hint notes since when a sandbox has been one of hints alone.
func (p *plane) hint(id sandbox.ID, apply func() bool) {
	p.table.mu.Lock()
	stood := p.table.hints.stands(id) != nil
	p.table.mu.Unlock()
	if apply() && (!stood || time.Since(p.hints[id]) >= HintTTL) {
		p.hints[id] = time.Now()
	}
}

// check compares with the table without hints.
func (p *plane) check(t *testing.T) {
	t.Helper()
	p.checkTruth(t)
	p.checkSeen(t)
}

// checkTruth finds that hints change no truth, and hide it for a bounded time.
func (p *plane) checkTruth(t *testing.T) {
	t.Helper()
	for r := range p.base.All() {
		rec := p.table.current.Load().byID.get(r.ID).base()
		if rec == nil || rec.Route != r || rec.Epoch.Ended() == r.Reachable() {
			t.Fatalf("a hint changed the truth about %s: %+v, want %+v", r.ID, rec, r)
		}
		e, ok := look(p.table, r.ID)
		if (!ok || e.Hint) && time.Since(p.hints[r.ID]) >= HintTTL {
			t.Fatalf("%s: hidden or replaced, without a hint for %s", r.ID, time.Since(p.hints[r.ID]))
		}
		if ok && !e.Hint && e.Route != r {
			t.Fatalf("%s: not a hint, nor the truth: %+v", r.ID, e.Route)
		}
	}
}

// checkSeen finds that nothing which is seen leads to another's address, or is a hint for too long.
func (p *plane) checkSeen(t *testing.T) {
	t.Helper()
	holder := map[netip.Addr]sandbox.ID{}
	for r := range p.base.All() {
		if r.Address.IsValid() {
			holder[r.Address] = r.ID
		}
	}
	for r := range p.table.All() {
		if owner, held := holder[r.Address]; held && owner != r.ID && r.Reachable() {
			t.Fatalf("%s leads to the address of %s", r.ID, owner)
		}
		e, ok := look(p.table, r.ID)
		if !ok || e.Route != r || e.Epoch.Ended() == e.Reachable() {
			t.Fatalf("All has %+v, Lookup %v %+v, epoch ended %v", r, ok, e.Route, e.Epoch.Ended())
		}
		if e.Hint && time.Since(p.hints[r.ID]) >= HintTTL {
			t.Fatalf("%s: a hint of %s", r.ID, time.Since(p.hints[r.ID]))
		}
	}
}

// TestPlanesAgree lets two replicas receive one simulation in ways of their own, with lies among it. Once
// the watch has caught up and the false hints have expired, both tables are right.
func TestPlanesAgree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for seed := range uint64(80) {
			w := &simulation{rng: rand.New(rand.NewPCG(seed, 4))}
			planes := []*plane{{w: w, rng: rand.New(rand.NewPCG(seed, 5))}, {w: w, rng: rand.New(rand.NewPCG(seed, 6))}}
			for _, p := range planes {
				p.boot()
			}
			for range 300 {
				for _, p := range planes {
					p.step()
					p.check(t)
				}
			}
			time.Sleep(HintTTL) // no writer comes by
			for _, p := range planes {
				p.check(t)
				for ; p.seen < len(w.tales); p.seen++ {
					p.both(w.tales[p.seen].apply)
				}
				p.both(func(x *Table) { x.Progress(strconv.Itoa(w.version)) })
				w.compare(t, seed, p.table)
			}
		}
	})
}

// compare checks a table against the objects.
func (w *simulation) compare(t *testing.T, seed uint64, x *Table) {
	t.Helper()
	alive := 0
	for i, s := range w.named {
		id, named := x.LookupName("ns", "n"+strconv.Itoa(i))
		if s == nil || s.DeletionTimestamp != nil {
			if named {
				t.Errorf("seed %d: name %d of a dead sandbox leads to %s", seed, i, id)
			}
			continue
		}
		alive++
		want := routeOf(s)
		if e, ok := look(x, want.ID); !ok || e.Route != want || e.Hint || !named || id != want.ID {
			t.Errorf("seed %d: %v %+v (hint %v), by name %q; want %+v", seed, ok, e.Route, e.Hint, id, want)
		}
	}
	if x.Len() != alive {
		t.Errorf("seed %d: %d routes, want %d", seed, x.Len(), alive)
	}
}
