package claim

import (
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// poolSlots bounds the workers that wait for members of one pool, so that a slowly filling pool does not
// block claims on other pools. Requests without a slot are enqueued in order when a slot is free.
// It is safe for concurrent use.
type poolSlots struct {
	most int

	mu sync.Mutex
	// +checklocks:mu
	call func(reconcile.Request)
	held map[reconcile.Request]types.UID // +checklocks:mu
	// used counts the held slots, and parked has the requests that wait, both by pool.
	used   map[types.UID]int                 // +checklocks:mu
	parked map[types.UID][]reconcile.Request // +checklocks:mu
}

func newPoolSlots(most int) *poolSlots {
	return &poolSlots{
		most: max(most, 1), call: func(reconcile.Request) {},
		held: map[reconcile.Request]types.UID{}, used: map[types.UID]int{}, parked: map[types.UID][]reconcile.Request{},
	}
}

// start sets the callback for a request that got a slot.
func (p *poolSlots) start(call func(reconcile.Request)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.call = call
}

// acquire reports whether a request may wait for a member of the pool now. If not, it is parked.
func (p *poolSlots) acquire(req reconcile.Request, pool types.UID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held[req] == pool {
		return true
	}
	if p.used[pool] < p.most && len(p.parked[pool]) == 0 {
		p.held[req] = pool
		p.used[pool]++
		return true
	}
	if !slices.Contains(p.parked[pool], req) {
		p.parked[pool] = append(p.parked[pool], req)
	}
	return false
}

// release frees the slot of a request, if any, and gives it to the next parked one.
func (p *poolSlots) release(req reconcile.Request) {
	p.mu.Lock()
	pool, has := p.held[req]
	if !has {
		p.mu.Unlock()
		return
	}
	delete(p.held, req)
	p.used[pool]--
	var next reconcile.Request
	queue := p.parked[pool]
	more := len(queue) > 0
	if more {
		next, p.parked[pool] = queue[0], queue[1:]
		p.held[next] = pool
		p.used[pool]++
	}
	if len(p.parked[pool]) == 0 {
		delete(p.parked, pool)
	}
	if p.used[pool] == 0 {
		delete(p.used, pool)
	}
	call := p.call
	p.mu.Unlock()
	if more {
		call(next)
	}
}
