package push

import (
	"container/list"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Queue has the routes to send to one member: the newest of each sandbox, in the order in which the
// sandboxes were added. When it is full, the oldest is dropped. Make it with NewQueue.
type Queue struct {
	max int
	// Wake has an element when the queue may be nonempty.
	Wake chan struct{}

	mu    sync.Mutex
	order *list.List                   // +checklocks:mu
	at    map[sandbox.ID]*list.Element // +checklocks:mu
}

// Outcome is the result of adding a route.
type Outcome int

// What adding a route did.
const (
	Queued    Outcome = iota
	Coalesced         // it replaced an older one, or was itself older
	Overflown         // it is queued, and the oldest was dropped
)

// NewQueue returns a queue of at most so many routes.
func NewQueue(maxRoutes int) *Queue {
	return &Queue{max: maxRoutes, Wake: make(chan struct{}, 1), order: list.New(), at: map[sandbox.ID]*list.Element{}}
}

// Add blocks only for other short calls. The route must not be changed afterwards.
func (q *Queue) Add(r *Route) Outcome {
	did := q.insert(r)
	select {
	case q.Wake <- struct{}{}:
	default:
	}
	return did
}

func (q *Queue) insert(r *Route) Outcome {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.mergeLocked(r) {
		return Coalesced
	}
	did := Queued
	if q.order.Len() >= q.max {
		q.removeLocked(q.order.Front())
		did = Overflown
	}
	q.at[r.ID] = q.order.PushBack(r)
	return did
}

// mergeLocked reports whether the queue has the sandbox; if so it keeps the newer route.
//
// +checklocks:q.mu
func (q *Queue) mergeLocked(r *Route) bool {
	e, ok := q.at[r.ID]
	if ok && Supersedes(r, routeOf(e)) {
		e.Value = r
	}
	return ok
}

// +checklocks:q.mu
func (q *Queue) removeLocked(e *list.Element) *Route {
	q.order.Remove(e)
	r := routeOf(e)
	delete(q.at, r.ID)
	return r
}

func routeOf(e *list.Element) *Route {
	r, _ := e.Value.(*Route)
	return r
}

// Take removes the oldest routes, at most n.
func (q *Queue) Take(n int) []*Route {
	q.mu.Lock()
	defer q.mu.Unlock()
	taken := make([]*Route, 0, min(n, q.order.Len()))
	for len(taken) < n && q.order.Len() > 0 {
		taken = append(taken, q.removeLocked(q.order.Front()))
	}
	return taken
}

// PutBack returns routes that could not be sent; newer ones added meanwhile stay. It returns how many
// were dropped because the queue was full.
func (q *Queue) PutBack(taken []*Route) (lost int) {
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

// Len returns the number of routes.
func (q *Queue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.order.Len()
}
