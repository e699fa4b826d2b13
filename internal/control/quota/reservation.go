package quota

import "time"

// Reservation is a grant whose sandbox the cache does not show yet. Its methods accept a nil receiver.
type Reservation struct {
	quotas    *Quotas
	namespace string
	size      Size

	// Guarded by Quotas.mu.
	sandbox  string // empty until it is known
	since    time.Time
	released bool
}

// For sets the sandbox that the reservation is for. Call it before the write of the sandbox, and again
// if another one is chosen. The reservation ends once the cache shows that sandbox as running.
func (r *Reservation) For(name string) {
	if r == nil {
		return
	}
	q := r.quotas
	q.mu.Lock()
	defer q.unlock()
	if r.released {
		return
	}
	b := q.usageLocked(r.namespace)
	if _, held := b.reservations[r]; !held { // a sandbox of another claim had ended it
		b.reservations[r] = struct{}{}
		b.reserved.add(r.size, 1)
	}
	if b.bySandbox[r.sandbox] == r {
		delete(b.bySandbox, r.sandbox)
	}
	r.sandbox, r.since = name, time.Now()
	if e, known := b.sandboxes[name]; known && !e.paused {
		b.drop(r)
		return
	}
	b.bySandbox[name] = r
}

// Release ends the reservation. It may be called more than once.
func (r *Reservation) Release() {
	if r == nil {
		return
	}
	q := r.quotas
	q.mu.Lock()
	defer q.unlock()
	r.released = true
	b := q.usageLocked(r.namespace)
	b.drop(r)
	b.deleteIfEmpty(q.namespaces, r.namespace)
}
