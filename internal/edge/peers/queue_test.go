package peers

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// history makes what truly happens: sandboxes are made, change and die, each event of them with
// the next version; a name comes back as another sandbox.
func history(rnd *rand.Rand, events int) []push.Route {
	type life struct{ uid, name int }
	var out []push.Route
	version, made := 0, 0
	alive := map[int]*life{} // by name
	for len(out) < events {
		version += 1 + rnd.IntN(5)
		name := rnd.IntN(6)
		l := alive[name]
		if l == nil {
			made++
			l = &life{made, name}
			alive[name] = l
		}
		r := testRoute(l.uid, fmt.Sprint(version))
		r.Name = fmt.Sprintf("n%d", name)
		dead := rnd.IntN(4) == 0
		if rnd.IntN(3) == 0 {
			r.State = sandbox.Paused
		}
		if dead {
			delete(alive, name)
			r.State = sandbox.Dead
		}
		out = append(out, push.Route{Route: r, Deleted: dead})
	}
	return out
}

func apply(t *route.Table, r push.Route) {
	if r.Deleted {
		t.Delete(r.ID, r.ResourceVersion)
	} else {
		t.Upsert(r.Route)
	}
}

func contents(t *route.Table) map[sandbox.ID]string {
	all := map[sandbox.ID]string{}
	for r := range t.All() {
		all[r.ID] = r.ResourceVersion + string(r.State)
	}
	return all
}

func same(a, b map[sandbox.ID]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return true
}

// TestQueueAgainstModel adds in any order, takes and puts back at any time, and compares with a
// plain list.
func TestQueueAgainstModel(t *testing.T) { //nolint:gocyclo // the model beside the queue
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		const room = 5
		q := push.NewQueue(room)
		var model []push.Route // in the order of the queue
		at := func(id sandbox.ID) int {
			return slices.IndexFunc(model, func(r push.Route) bool { return r.ID == id })
		}
		events := history(rnd, 60)
		rnd.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
		for _, e := range events {
			switch i := at(e.ID); {
			case i >= 0:
				if push.Supersedes(&e, &model[i]) {
					model[i] = e
				}
				if q.Add(&e) != push.Coalesced {
					t.Fatalf("seed %d: not coalesced", seed)
				}
			default:
				full := len(model) == room
				if full {
					model = model[1:]
				}
				model = append(model, e)
				if did := q.Add(&e); (did == push.Overflown) != full {
					t.Fatalf("seed %d: outcome %d of a full=%v queue", seed, did, full)
				}
			}
			if rnd.IntN(5) == 0 {
				n := rnd.IntN(room)
				taken := q.Take(n)
				for i, r := range taken {
					if *r != model[i] {
						t.Fatalf("seed %d: took %v, want %v", seed, *r, model[i])
					}
				}
				if len(taken) != min(n, len(model)) {
					t.Fatalf("seed %d: took %d of %d", seed, len(taken), len(model))
				}
				if rnd.IntN(2) == 0 {
					if lost := q.PutBack(taken); lost != 0 {
						t.Fatalf("seed %d: lost %d that were in it before", seed, lost)
					}
				} else {
					model = model[len(taken):]
				}
			}
			if q.Len() != len(model) || q.Len() > room {
				t.Fatalf("seed %d: %d queued, want %d", seed, q.Len(), len(model))
			}
		}
	}
}

func TestPutBack(t *testing.T) {
	q := push.NewQueue(2)
	r := func(n int, v string) *push.Route { return &push.Route{Route: testRoute(n, v)} }
	for _, x := range []*push.Route{r(1, "1"), r(2, "1")} {
		q.Add(x)
	}
	taken := q.Take(2)
	q.Add(r(2, "2")) // newer than what is out
	q.Add(r(3, "1"))
	if lost := q.PutBack(taken); lost != 1 {
		t.Errorf("lost %d, want the oldest", lost)
	}
	left := q.Take(5)
	if len(left) != 2 || left[0].ResourceVersion != "2" || left[1].ID != r(3, "").ID {
		t.Errorf("left %v", left)
	}
	q.Add(r(1, "5"))
	q.PutBack([]*push.Route{{Route: testRoute(1, "7")}}) // an older one was pushed meanwhile
	if left := q.Take(5); len(left) != 1 || left[0].ResourceVersion != "7" {
		t.Errorf("left %v", left)
	}
	dead := r(4, "3")
	dead.Deleted = true
	q.Add(r(4, "3"))
	q.Add(dead)
	q.Add(r(4, "3"))
	if left := q.Take(5); len(left) != 1 || !left[0].Deleted {
		t.Errorf("of one version, dead is the last word: %v", left)
	}
	q.Add(r(5, "9"))
	q.Add(r(5, "10")) // not as strings
	if left := q.Take(5); left[0].ResourceVersion != "10" {
		t.Errorf("9 is newer than %s", left[0].ResourceVersion)
	}
}

// TestTablesConverge sends one history through queues that coalesce to tables, in any order, in
// parts and doubled: each ends as a table does that got all in order.
func TestTablesConverge(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 2))
		events := history(rnd, 80)
		truth := route.NewTable()
		for _, e := range events {
			apply(truth, e)
		}
		table := route.NewTable()
		q := push.NewQueue(len(events))
		order := rnd.Perm(len(events))
		var sent []push.Route
		for _, i := range order {
			e := events[i]
			q.Add(&e)
			if rnd.IntN(4) > 0 {
				continue
			}
			taken := q.Take(1 + rnd.IntN(4))
			if rnd.IntN(4) == 0 {
				q.PutBack(taken)
				continue
			}
			for _, r := range taken {
				sent = append(sent, *r)
				apply(table, *r)
			}
			if len(sent) > 0 && rnd.IntN(3) == 0 {
				apply(table, sent[rnd.IntN(len(sent))]) // again
			}
		}
		for _, r := range q.Take(len(events)) {
			apply(table, *r)
		}
		if !same(contents(table), contents(truth)) {
			t.Fatalf("seed %d: %v\nwant %v", seed, contents(table), contents(truth))
		}
	}
}
