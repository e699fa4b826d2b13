package peers

import (
	"container/list"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// queue is what one member is still to be told: the newest route of each sandbox, in the order in
// which the sandboxes came. When it is full, the oldest is lost. Make it with newQueue.
type queue struct {
	max int
	// wake has an element when there may be something to take.
	wake chan struct{}

	mu    sync.Mutex
	order *list.List                   // +checklocks:mu
	at    map[sandbox.ID]*list.Element // +checklocks:mu
}

// outcome is what became of a route that was added.
type outcome int

const (
	queued    outcome = iota
	coalesced         // it took the place of an older one, or was itself the older
	overflown         // it is queued, and the oldest is lost
)

func newQueue(maxRoutes int) *queue {
	return &queue{max: maxRoutes, wake: make(chan struct{}, 1), order: list.New(), at: map[sandbox.ID]*list.Element{}}
}

// add never waits for anything but other calls of the same short kind. The route must not be
// changed afterwards.
func (q *queue) add(r *Route) outcome {
	did := q.insert(r)
	select {
	case q.wake <- struct{}{}:
	default:
	}
	return did
}

func (q *queue) insert(r *Route) outcome {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.mergeLocked(r) {
		return coalesced
	}
	did := queued
	if q.order.Len() >= q.max {
		q.removeLocked(q.order.Front())
		did = overflown
	}
	q.at[r.ID] = q.order.PushBack(r)
	return did
}

// mergeLocked reports whether the queue knows the sandbox; if so it keeps the newer route.
//
// +checklocks:q.mu
func (q *queue) mergeLocked(r *Route) bool {
	e, ok := q.at[r.ID]
	if ok && supersedes(r, routeOf(e)) {
		e.Value = r
	}
	return ok
}

// +checklocks:q.mu
func (q *queue) removeLocked(e *list.Element) *Route {
	q.order.Remove(e)
	r := routeOf(e)
	delete(q.at, r.ID)
	return r
}

func routeOf(e *list.Element) *Route {
	r, _ := e.Value.(*Route)
	return r
}

// take removes the oldest routes, at most n.
func (q *queue) take(n int) []*Route {
	q.mu.Lock()
	defer q.mu.Unlock()
	taken := make([]*Route, 0, min(n, q.order.Len()))
	for len(taken) < n && q.order.Len() > 0 {
		taken = append(taken, q.removeLocked(q.order.Front()))
	}
	return taken
}

// putBack returns what was taken and could not be sent; newer routes that came meanwhile stay. It
// returns how many found no room.
func (q *queue) putBack(taken []*Route) (lost int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := len(taken) - 1; i >= 0; i-- { //nolint:modernize // checklocks does not follow the lock into an iterator
		r := taken[i]
		switch {
		case q.mergeLocked(r):
		case q.order.Len() >= q.max:
			lost++
		default:
			q.at[r.ID] = q.order.PushFront(r)
		}
	}
	return lost
}

func (q *queue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.order.Len()
}
