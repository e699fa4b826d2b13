package quota

import "time"

// Reservation is a grant that is not yet a sandbox in the cache. Its methods may be called on nil.
type Reservation struct {
	quotas    *Quotas
	namespace string
	size      Size

	// Guarded by Quotas.mu, as its books are.
	sandbox  string // empty until it is known
	since    time.Time
	released bool
}

// For says which sandbox of the namespace the reservation is for. Call it before the sandbox is
// written, and again if it becomes another: the grant ends by itself as soon as the cache shows
// a sandbox of that name which counts.
func (r *Reservation) For(name string) {
	if r == nil {
		return
	}
	q := r.quotas
	q.mu.Lock()
	defer q.mu.Unlock()
	if r.released {
		return
	}
	b := q.usageLocked(r.namespace)
	if _, held := b.reservations[r]; !held { // another's sandbox was taken for ours
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

// Release gives the grant back, if it has not ended.
func (r *Reservation) Release() {
	if r == nil {
		return
	}
	q := r.quotas
	q.mu.Lock()
	defer q.mu.Unlock()
	r.released = true
	b := q.usageLocked(r.namespace)
	b.drop(r)
	b.tidy(q.namespaces, r.namespace)
}
