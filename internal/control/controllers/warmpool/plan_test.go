package warmpool

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

var epoch = time.Unix(1_700_000_000, 0)

// pick writes members as words: state, revision, and age in seconds, such as "ready/new/5".
func pick(t *testing.T, text string) (all []member) {
	t.Helper()
	states := map[string]state{"starting": starting, "waiting": waiting, "barred": startRefused, "ready": ready, "failed": failed, "ending": ending}
	for i, word := range strings.Fields(text) {
		part := strings.Split(word, "/")
		var age int
		if _, err := fmt.Sscan(part[2], &age); err != nil {
			t.Fatal(err)
		}
		m := member{name: fmt.Sprint("m", i), uid: types.UID(fmt.Sprint("u", i)), version: "1", revision: part[1], created: epoch.Add(-time.Duration(age) * time.Second)}
		var known bool
		if m.state, known = states[part[0]]; !known {
			t.Fatalf("no state %q", part[0])
		}
		if m.state != ready {
			m.since = m.created
		}
		all = append(all, m)
	}
	return all
}

func TestPlan(t *testing.T) {
	for name, give := range map[string]struct {
		target  poolTarget
		members string
		create  int
		remove  string // names, in order
	}{
		"empty":                              {poolTarget{desired: 3}, "", 3, ""},
		"full":                               {poolTarget{desired: 2}, "ready/new/1 ready/new/1", 0, ""},
		"some on their way":                  {poolTarget{desired: 3}, "starting/new/1 waiting/new/1", 1, ""},
		"none wanted":                        {poolTarget{}, "ready/new/1 starting/new/1", 0, "m1 m0"},
		"excess: unready first":              {poolTarget{desired: 1}, "ready/new/1 starting/new/9 waiting/new/5", 0, "m2 m1"},
		"excess: then the newest":            {poolTarget{desired: 1}, "ready/new/2 ready/new/3 ready/new/1", 0, "m2 m0"},
		"excess: stale before unready":       {poolTarget{desired: 1}, "starting/new/1 ready/old/9", 0, "m1"},
		"failed are replaced when gone":      {poolTarget{desired: 2}, "failed/new/1 ready/new/1", 0, "m0"},
		"failed are kept for a while":        {poolTarget{desired: 2, hold: true, probe: true}, "failed/new/1 ready/new/1", 0, ""},
		"failed ones of old are not":         {poolTarget{desired: 2, hold: true, probe: true}, "failed/old/1 ready/new/1", 0, "m0"},
		"failed go first":                    {poolTarget{desired: 1, hold: true, probe: true}, "starting/new/1 failed/new/9", 0, "m1"},
		"after failures one at a time":       {poolTarget{desired: 9, probe: true}, "", 1, ""},
		"after failures no second":           {poolTarget{desired: 9, probe: true}, "starting/new/1", 0, ""},
		"barred are kept":                    {poolTarget{desired: 2}, "barred/new/9000 barred/new/9000", 0, ""},
		"barred ones of old are not":         {poolTarget{desired: 2}, "barred/old/9000 ready/new/1", 0, "m0"},
		"barred go before ready":             {poolTarget{desired: 1}, "ready/new/1 barred/new/9000", 0, "m1"},
		"no revision: barred stay":           {poolTarget{desired: 1, revision: "-"}, "barred/old/1", 0, ""},
		"terminating count":                  {poolTarget{desired: 2}, "ending/new/1 ready/new/1", 0, ""},
		"terminating count no longer":        {poolTarget{desired: 2}, "ending/new/600 ready/new/1", 1, ""},
		"terminating count after all":        {poolTarget{desired: 2}, "ending/new/600 ending/new/600 ending/new/600 ending/new/600", 0, ""},
		"no revision: nothing made":          {poolTarget{desired: 3, revision: "-"}, "ready/old/1", 0, ""},
		"no revision: failed stay":           {poolTarget{desired: 3, revision: "-"}, "failed/old/1 ready/old/1", 0, ""},
		"no revision: fewer":                 {poolTarget{desired: 1, revision: "-"}, "ready/old/1 starting/older/1", 0, "m1"},
		"recreate: all at once":              {poolTarget{desired: 2, unavailable: 2, recreate: true}, "ready/old/1 ready/old/2", 0, "m0 m1"},
		"recreate: makes up for the gone":    {poolTarget{desired: 2, unavailable: 2, recreate: true}, "ending/old/1", 1, ""},
		"recreate: one at a time":            {poolTarget{desired: 3, unavailable: 1, recreate: true}, "ready/old/1 ready/old/2 ready/old/3", 0, "m0"},
		"recreate: waits for readiness":      {poolTarget{desired: 3, unavailable: 1, recreate: true}, "ready/old/1 ready/old/2 starting/new/3", 0, ""},
		"recreate: unready old go free":      {poolTarget{desired: 3, surge: 1, recreate: true}, "ready/old/1 ready/old/2 starting/old/3", 1, "m2"},
		"recreate: surge comes first":        {poolTarget{desired: 2, surge: 1, recreate: true}, "ready/old/1 ready/old/2", 1, ""},
		"recreate: surge is used up":         {poolTarget{desired: 2, surge: 1, recreate: true}, "ready/old/1 ready/old/2 starting/new/1", 0, ""},
		"recreate: surge makes one free":     {poolTarget{desired: 2, surge: 1, recreate: true}, "ready/old/1 ready/old/2 ready/new/1", 0, "m0"},
		"recreate: no surge beyond":          {poolTarget{desired: 2, surge: 5, recreate: true}, "ready/new/1", 1, ""},
		"replenish: unused, left alone":      {poolTarget{desired: 3}, "ready/old/1 ready/old/2 ready/old/3", 0, ""},
		"replenish: free places get new":     {poolTarget{desired: 3}, "ready/old/1", 2, ""},
		"replenish: a claim brings one":      {poolTarget{desired: 3, inUse: 1}, "ready/old/1 ready/old/2 ready/old/3", 0, "m0"},
		"replenish: and no more":             {poolTarget{desired: 3, inUse: 1}, "ending/old/1 ready/old/2 ready/old/3", 0, ""},
		"replenish: as long as it starts":    {poolTarget{desired: 3, inUse: 1}, "starting/new/1 ready/old/2 ready/old/3", 0, ""},
		"replenish: use of more":             {poolTarget{desired: 3, inUse: 9}, "ready/new/1 ready/old/2 ready/old/3", 0, "m1 m2"},
		"replenish: stale are the first":     {poolTarget{desired: 2}, "ready/new/1 ready/old/2 ready/old/3", 0, "m1"},
		"replenish: the broken old give way": {poolTarget{desired: 2}, "failed/old/1 ready/old/2", 0, "m0"},
	} {
		t.Run(name, func(t *testing.T) {
			w := give.target
			w.goneAfter = 5 * time.Minute
			switch w.revision {
			case "":
				w.revision = "new"
			case "-":
				w.revision = ""
			}
			got := plan(w, pick(t, give.members), epoch)
			var names []string
			for _, m := range got.remove {
				names = append(names, m.name)
			}
			if got.create != give.create || strings.Join(names, " ") != give.remove {
				t.Errorf("create %d, remove %v; want %d and %q", got.create, names, give.create, give.remove)
			}
		})
	}
}

// What the cache has not shown cannot be deleted: its version is not known.
func TestPlanLeavesTheUnseen(t *testing.T) {
	members := pick(t, "starting/new/1 starting/old/1 ready/new/1")
	members[0].version, members[1].version = "", ""
	got := plan(poolTarget{revision: "new", recreate: true}, members, epoch)
	if len(got.remove) != 1 || got.remove[0].name != "m2" {
		t.Errorf("remove %v", got.remove)
	}
}

// simulation is a pool over which plan is run again and again while the world goes its way.
type simulation struct {
	target  poolTarget
	members []member
	rand    *rand.Rand
	now     time.Time
	made    int
}

func (s *simulation) count(want state, revision string) (n int) {
	for _, m := range s.members {
		if m.state == want && (revision == "" || m.revision == revision) {
			n++
		}
	}
	return n
}

// pass plans and applies, and returns the bound that was broken.
func (s *simulation) pass() error {
	before, wasReady := len(s.members), s.count(ready, "")
	a := plan(s.target, s.members, s.now)
	for _, m := range a.remove {
		i := slices.IndexFunc(s.members, func(o member) bool { return o.uid == m.uid })
		if s.members[i].state == ending {
			return fmt.Errorf("%s is deleted twice", m.name)
		}
		s.members[i].state, s.members[i].since = ending, s.now
	}
	for range a.create {
		s.made++
		id := fmt.Sprint("m", s.made)
		s.members = append(s.members, member{name: id, uid: types.UID(id), version: "1", revision: s.target.revision, created: s.now, since: s.now})
	}
	limit := s.target.desired
	if s.target.recreate {
		limit += s.target.surge
	}
	if a.create > 0 && len(s.members) > limit {
		return fmt.Errorf("%d exist of %d after %d were made", len(s.members), limit, a.create)
	}
	floor := s.target.desired - s.target.unavailable
	if isReady := s.count(ready, ""); s.target.recreate && isReady < min(floor, wasReady) {
		return fmt.Errorf("%d of %d are ready, %d were of %d", isReady, floor, wasReady, before)
	}
	return nil
}

// event is something that happens in the world.
func (s *simulation) event() {
	if len(s.members) == 0 {
		return
	}
	i := s.rand.IntN(len(s.members))
	switch m := &s.members[i]; m.state {
	case starting, waiting:
		m.state, m.since = ready, time.Time{}
		if s.rand.IntN(8) == 0 {
			m.state = failed
		} else if s.rand.IntN(8) == 0 {
			m.state = startRefused
		}
	case ending:
		s.members = slices.Delete(s.members, i, i+1)
	case ready:
		if s.rand.IntN(4) == 0 { // claimed
			s.members = slices.Delete(s.members, i, i+1)
			s.target.inUse++
		}
	case startRefused, failed:
	}
}

func (s *simulation) settle() {
	for i := 0; i < len(s.members); i++ {
		switch m := &s.members[i]; m.state {
		case starting, waiting, startRefused:
			m.state, m.since = ready, time.Time{}
		case ending:
			s.members = slices.Delete(s.members, i, i+1)
			i--
		case ready, failed:
		}
	}
}

// The bounds hold after any events; and once there are none, the pool is as wished.
func TestPlanProperties(t *testing.T) {
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 7))
		s := &simulation{rand: r, now: epoch, target: poolTarget{revision: "r0", goneAfter: time.Hour}}
		for step := range 60 {
			s.now = s.now.Add(time.Second)
			if step%15 == 0 {
				s.target.recreate = r.IntN(2) == 0
				s.target.desired, s.target.surge = r.IntN(12), r.IntN(3)
				s.target.unavailable = r.IntN(s.target.desired + 1)
				if s.target.surge == 0 && s.target.unavailable == 0 {
					s.target.unavailable = min(1, s.target.desired)
				}
				s.target.revision, s.target.inUse = fmt.Sprint("r", r.IntN(3)), 0
			}
			s.target.hold = r.IntN(10) == 0
			s.target.probe = s.target.hold || r.IntN(10) == 0
			if err := s.pass(); err != nil {
				t.Fatalf("seed %d, step %d, %+v: %v", seed, step, s.target, err)
			}
			for range r.IntN(4) {
				s.event()
			}
		}
		s.target.hold, s.target.probe, s.target.inUse = false, false, 100
		for range 60 {
			s.settle()
			if err := s.pass(); err != nil {
				t.Fatalf("seed %d, at the end, %+v: %v", seed, s.target, err)
			}
		}
		if n := s.count(ready, s.target.revision); n != s.target.desired || len(s.members) != n {
			t.Fatalf("seed %d, %+v: ends with %d, of which %d are ready and current", seed, s.target, len(s.members), n)
		}
	}
}
