package claim

import (
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// turns bounds how many workers wait for the members of one pool, so that a pool that fills
// slowly does not hold up the claims on others. Who finds no turn left is told, in order, when
// one is free. Its methods may be called by anyone at any time.
type poolSlots struct {
	most int

	mu sync.Mutex
	// +checklocks:mu
	call func(reconcile.Request)
	held map[reconcile.Request]types.UID // +checklocks:mu
	// used counts held turns, and parked are those that wait for one, both by pool.
	used   map[types.UID]int                 // +checklocks:mu
	parked map[types.UID][]reconcile.Request // +checklocks:mu
}

func newTurns(most int) *poolSlots {
	return &poolSlots{
		most: max(most, 1), call: func(reconcile.Request) {},
		held: map[reconcile.Request]types.UID{}, used: map[types.UID]int{}, parked: map[types.UID][]reconcile.Request{},
	}
}

// start says how to tell of a free turn.
func (t *poolSlots) start(call func(reconcile.Request)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.call = call
}

// take reports whether who asks may wait for a member of the pool now. If not, it is in the row.
func (t *poolSlots) take(who reconcile.Request, pool types.UID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.held[who] == pool {
		return true
	}
	if t.used[pool] < t.most && len(t.parked[pool]) == 0 {
		t.held[who] = pool
		t.used[pool]++
		return true
	}
	if !slices.Contains(t.parked[pool], who) {
		t.parked[pool] = append(t.parked[pool], who)
	}
	return false
}

// end gives back the turn of who has one, and gives it to the next in the row.
func (t *poolSlots) end(who reconcile.Request) {
	t.mu.Lock()
	pool, has := t.held[who]
	if !has {
		t.mu.Unlock()
		return
	}
	delete(t.held, who)
	t.used[pool]--
	var next reconcile.Request
	row := t.parked[pool]
	more := len(row) > 0
	if more {
		next, t.parked[pool] = row[0], row[1:]
		t.held[next] = pool
		t.used[pool]++
	}
	if len(t.parked[pool]) == 0 {
		delete(t.parked, pool)
	}
	if t.used[pool] == 0 {
		delete(t.used, pool)
	}
	call := t.call
	t.mu.Unlock()
	if more {
		call(next)
	}
}
