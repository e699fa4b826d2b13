package peers

import (
	"container/list"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// queue has the routes to send to one member: the newest of each sandbox, in the order in which the
// sandboxes were added. When it is full, the oldest is dropped. Make it with newQueue.
type queue struct {
	max int
	// wake has an element when the queue may be nonempty.
	wake chan struct{}

	mu    sync.Mutex
	order *list.List                   // +checklocks:mu
	at    map[sandbox.ID]*list.Element // +checklocks:mu
}

// outcome is the result of adding a route.
type outcome int

const (
	queued    outcome = iota
	coalesced         // it replaced an older one, or was itself older
	overflown         // it is queued, and the oldest was dropped
)

func newQueue(maxRoutes int) *queue {
	return &queue{max: maxRoutes, wake: make(chan struct{}, 1), order: list.New(), at: map[sandbox.ID]*list.Element{}}
}

// add blocks only for other short calls. The route must not be changed afterwards.
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

// mergeLocked reports whether the queue has the sandbox; if so it keeps the newer route.
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

// putBack returns routes that could not be sent; newer ones added meanwhile stay. It returns how many
// were dropped because the queue was full.
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
