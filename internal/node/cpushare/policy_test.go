package cpushare

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

const step = 200 * time.Millisecond

// machine is a scheduler of fluids: sandboxes share its cores equally up to what they demand, and lowered ones have the rest.
type machine struct {
	cores  float64
	demand map[string]float64
	policy *policy
	idle   float64
	// lowerings and raises count the changes of each sandbox.
	lowerings, raises map[string]int
	used              map[string]float64
}

func newMachine(cores float64, demand map[string]float64) *machine {
	return &machine{cores: cores, demand: demand, policy: newPolicy(), idle: 1, lowerings: map[string]int{}, raises: map[string]int{}}
}

func (m *machine) run(length time.Duration) {
	for range length / step {
		m.used = map[string]float64{}
		left := m.share(m.cores, false)
		left = m.share(left, true)
		m.idle += keep(step) * (left/m.cores - m.idle)
		before := map[string]bool{}
		for name := range m.demand {
			before[name] = m.policy.lowered(name)
		}
		m.policy.decide(maps.Clone(m.used), m.idle, step)
		for name, was := range before {
			switch is := m.policy.lowered(name); {
			case is && !was:
				m.lowerings[name]++
			case was && !is:
				m.raises[name]++
			}
		}
	}
}

// share gives cores to the sandboxes of a priority, those that demand least first, and returns what is left.
func (m *machine) share(cores float64, lowered bool) float64 {
	names := slices.DeleteFunc(slices.Collect(maps.Keys(m.demand)), func(name string) bool { return m.policy.lowered(name) != lowered })
	slices.SortFunc(names, func(a, b string) int {
		if m.demand[a] < m.demand[b] {
			return -1
		}
		return 1
	})
	for i, name := range names {
		m.used[name] = min(m.demand[name], cores/float64(len(names)-i))
		cores -= m.used[name]
	}
	return cores
}

// want fails unless exactly these sandboxes were lowered, so many times each.
func (m *machine) want(t *testing.T, when string, lowerings map[string]int) {
	t.Helper()
	if !maps.Equal(m.lowerings, lowerings) {
		t.Fatalf("%s: lowered %v, want %v", when, m.lowerings, lowerings)
	}
}

func TestBusySandboxesGiveWay(t *testing.T) {
	m := newMachine(2, map[string]float64{"a": 2, "b": 2, "quick": 0})
	m.run(10 * time.Second)
	m.want(t, "no other waits", nil)
	m.demand["quick"] = 0.4
	m.run(3 * time.Second)
	both := map[string]int{"a": 1, "b": 1}
	m.want(t, "another one works", both)
	m.demand["quick"] = 0.9 // without a pause, in one process
	m.run(time.Minute)
	m.want(t, "a minute later", both)
	if m.used["quick"] != 0.9 || len(m.raises) > 0 {
		t.Fatalf("quick uses %v of 0.9 cores, raised: %v", m.used["quick"], m.raises)
	}

	m.demand["b"] = 0
	m.run(2 * time.Second)
	if !m.policy.lowered("a") {
		t.Fatal("raised a sandbox that is as busy as before")
	}
	m.demand["a"] = 0.1
	m.run(4 * time.Second)
	if !maps.Equal(m.raises, both) {
		t.Fatalf("raised %v when both were quiet, and processors idle", m.raises)
	}
}

// One that was the busiest, and then is not, gets its priority back beside one that is busier now.
func TestBusiestChanges(t *testing.T) {
	m := newMachine(2, map[string]float64{"a": 2, "b": 0.6, "c": 0.1})
	m.run(5 * time.Second)
	m.want(t, "a is the busiest", map[string]int{"a": 1})
	m.demand["a"], m.demand["b"] = 0.4, 3
	m.run(10 * time.Second)
	if m.policy.lowered("a") || !m.policy.lowered("b") || m.used["a"] != 0.4 {
		t.Fatalf("a has %v of 0.4 cores; lowered: a %v, b %v", m.used["a"], m.policy.lowered("a"), m.policy.lowered("b"))
	}
}

func TestLoneSandboxKeepsPriority(t *testing.T) {
	m := newMachine(4, map[string]float64{"a": 8, "sleeps": 0.01})
	m.run(time.Minute)
	m.want(t, "a lone busy one", nil)
}

func TestNothingChangesOnIdleMachine(t *testing.T) {
	m := newMachine(8, map[string]float64{"a": 4, "b": 1, "c": 0.3})
	m.run(time.Minute)
	m.want(t, "processors are idle", nil)
}

// A lowered sandbox has the rest, and that is not nothing for long.
func TestLoweredSandboxesAreNotStarved(t *testing.T) {
	m := newMachine(2, map[string]float64{"a": 2, "b": 0.3})
	m.run(5 * time.Second)
	m.want(t, "one is busy", map[string]int{"a": 1})
	for i := range 3 {
		m.demand[fmt.Sprint("late", i)] = 2
	}
	var cores float64
	for range 300 {
		m.run(step)
		cores += m.used["a"] / 300
	}
	if cores < 0.2 {
		t.Fatalf("it had %.2f of 2 cores beside three that are as busy", cores)
	}
}

// Whatever sandboxes demand: each that demands less than its share gets it, and priorities settle.
func TestAnyDemands(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // a test
		m := newMachine(float64(1+random.IntN(8)), map[string]float64{})
		for i := range 1 + random.IntN(12) {
			demand := random.Float64() * 0.2
			if random.IntN(3) == 0 {
				demand = 1 + random.Float64()*8
			}
			m.demand[fmt.Sprint(i)] = demand
		}
		m.run(20 * time.Second)
		clear(m.lowerings)
		m.run(time.Minute)
		for name, demand := range m.demand {
			if demand < m.cores/float64(len(m.demand)) && (m.policy.lowered(name) || m.used[name] < demand) {
				t.Errorf("seed %d: sandbox %s has %v of %v cores, lowered: %v", seed, name, m.used[name], demand, m.policy.lowered(name))
			}
			if m.lowerings[name] > 6 {
				t.Errorf("seed %d: sandbox %s was lowered %d times in a minute", seed, name, m.lowerings[name])
			}
		}
	}
}

func TestForgetsWhatIsGone(t *testing.T) {
	m := newMachine(2, map[string]float64{"a": 2, "b": 0.3})
	m.run(5 * time.Second)
	m.want(t, "one is busy", map[string]int{"a": 1})
	delete(m.demand, "a")
	m.run(step)
	if m.policy.anyLowered() {
		t.Fatal("it counts a sandbox that is gone")
	}
}

func TestConfinement(t *testing.T) {
	c := confinement{cores: 3}
	for _, now := range []struct {
		lowered, others float64
		length          time.Duration
		want            bool
	}{
		{lowered: 3.9, others: 0.01, length: time.Minute}, // nothing else works
		{lowered: 2.9, others: 0.5, length: time.Minute},  // one processor is left
		{lowered: 3.5, others: 0.5, length: step, want: true},
		{lowered: 3, others: 0.5, length: time.Minute, want: true},
		{lowered: 1, others: 0.5, length: time.Second, want: true}, // for too short a time
		{lowered: 3, others: 0.5, length: step, want: true},
		{lowered: 3, others: 0.01, length: time.Second, want: true},
		{lowered: 3, others: 0.5, length: step, want: true},
		{lowered: 3, others: 0.01, length: releaseAfter}, // the others rest
		{lowered: 4, others: 0.5, length: step, want: true},
		{lowered: 1, others: 3, length: releaseAfter}, // they need no more
	} {
		for range now.length / step {
			c.decide(now.lowered, now.others, step)
		}
		if c.on != now.want {
			t.Errorf("lowered use %v cores for %v, others %v: confined %v", now.lowered, now.length, now.others, c.on)
		}
	}
	one := confinement{}
	if one.decide(1, 1, step); one.on {
		t.Error("confined to no processor")
	}
}

func TestReserved(t *testing.T) {
	for n, want := range map[int]int{1: 1, 2: 1, 4: 1, 8: 2, 64: 16} {
		if got := reserved(n); got != want {
			t.Errorf("of %d processors %d are reserved, want %d", n, got, want)
		}
	}
}
