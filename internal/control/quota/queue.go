package quota

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	// maxWaiting bounds the requests that wait in one namespace.
	maxWaiting = 10_000
	// recheck is how often the first request of a queue tries again without an event: the annotations of its
	// namespace may have changed, or a reservation expired.
	recheck = 5 * time.Second
)

// Waiter is a request in the queue of a namespace. It is safe for concurrent use.
type Waiter struct {
	quotas    *Quotas
	namespace string
	since     int64 // Unix time, in seconds
	wake      func()
	place     *list.Element // guarded by Quotas.mu; nil after Leave
}

// Enqueue adds a request to the queue of a namespace, behind those with the same or an earlier second of since. wake is
// called while the request is the first of its queue: once when it becomes that, and whenever use has fallen. It must not
// block. The caller then calls Hold, and Leave in any case. An errs.ErrExhausted means that too many requests wait.
func (q *Quotas) Enqueue(namespace string, since time.Time, wake func()) (*Waiter, error) {
	q.mu.Lock()
	defer q.unlock()
	b := q.usageLocked(namespace)
	if b.queue.Len() >= maxWaiting {
		return nil, errs.Public(errs.ErrExhausted, fmt.Sprintf("queue of the namespace: %d requests wait already, and no more may", maxWaiting))
	}
	w := &Waiter{quotas: q, namespace: namespace, since: since.Unix(), wake: wake}
	after := b.queue.Back()
	for after != nil && waiterOf(after).since > w.since {
		after = after.Prev()
	}
	if after != nil {
		w.place = b.queue.InsertAfter(w, after)
		return w, nil
	}
	w.place = b.queue.PushFront(w)
	b.wakeFirst(q)
	return w, nil
}

func waiterOf(e *list.Element) *Waiter { return e.Value.(*Waiter) } //nolint:forcetypeassert // the lists have nothing else

// Hold is [Quotas.Hold] for the first request of a queue. For the others it is an errs.ErrExhausted. After a refusal, a
// positive retry is when to call it again although wake is not called.
func (w *Waiter) Hold(ctx context.Context, size Size) (r *Reservation, retry time.Duration, err error) {
	r, err = w.quotas.hold(ctx, Request{Namespace: w.namespace, Size: size}, w)
	switch {
	case errors.Is(err, errRate):
		return nil, rateRecheck, err
	case errors.Is(err, errs.ErrExhausted) && !errors.Is(err, errNotFirst):
		return nil, recheck, err
	}
	return r, 0, err
}

// Position returns the request's place in its queue, from 1, and the length of the queue; zeros after Leave.
func (w *Waiter) Position() (position, of int) {
	q := w.quotas
	q.mu.Lock()
	defer q.mu.Unlock()
	for e := w.place; e != nil; e = e.Prev() {
		position++
	}
	if position > 0 {
		of = q.usageLocked(w.namespace).queue.Len()
	}
	return position, of
}

// Leave removes the request from its queue; the next one may be first now. It may be called more than once, and on nil.
func (w *Waiter) Leave() {
	if w == nil {
		return
	}
	q := w.quotas
	q.mu.Lock()
	defer q.unlock()
	if w.place == nil {
		return
	}
	b := q.usageLocked(w.namespace)
	first := b.queue.Front() == w.place
	b.queue.Remove(w.place)
	w.place = nil
	if first {
		b.wakeFirst(q)
	}
	b.deleteIfEmpty(q.namespaces, w.namespace)
}

// Await is Hold for a request that may wait until there is room, for at most patience. Requests of a namespace are
// granted in the order of their calls; none overtakes one that needs more. Without room in time the error is an
// errs.ErrExhausted with the reason and the request's position; an errs.ErrTimeout if ctx ended.
func (q *Quotas) Await(ctx context.Context, req Request, patience time.Duration) (*Reservation, error) {
	first, began := make(chan struct{}, 1), time.Now()
	w, err := q.Enqueue(req.Namespace, began, func() {
		select {
		case first <- struct{}{}:
		default: // it has not looked since the last time
		}
	})
	if err != nil {
		return nil, err
	}
	defer w.Leave()
	expired := time.NewTimer(patience)
	defer expired.Stop()
	var again <-chan time.Time
	for {
		select {
		case <-first:
		case <-again:
		case <-expired.C:
			return nil, w.Expired(ctx, req.Size, time.Since(began))
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the quota of namespace %s: %w: %w", req.Namespace, errs.ErrTimeout, ctx.Err())
		}
		r, retry, err := w.Hold(ctx, req.Size)
		if !errors.Is(err, errs.ErrExhausted) {
			return r, err
		}
		if again = nil; retry > 0 {
			again = time.After(retry)
		}
	}
}

// Waiting returns the number of requests in the queue of a namespace.
func (q *Quotas) Waiting(namespace string) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if b := q.namespaces[namespace]; b != nil {
		return b.queue.Len()
	}
	return 0
}

// wakeFirst has unlock wake the first request of the queue.
func (b *namespaceUsage) wakeFirst(q *Quotas) {
	if front := b.queue.Front(); front != nil {
		q.woken = append(q.woken, waiterOf(front).wake)
	}
}

// unlock unlocks, and wakes the requests that may go on.
//
// +checklocksrelease:q.mu
func (q *Quotas) unlock() {
	woken := q.woken
	q.woken = nil
	q.mu.Unlock()
	for _, wake := range woken {
		wake()
	}
}

// Expired returns the errs.ErrExhausted of a request that was not granted in time: the reason, how long it waited, and its position.
func (w *Waiter) Expired(ctx context.Context, size Size, waited time.Duration) error {
	q := w.quotas
	limits, err := q.limits(ctx, w.namespace)
	if err != nil {
		return err
	}
	position, of := w.Position()
	q.mu.Lock()
	defer q.mu.Unlock()
	reason := "room was free for a moment only"
	if err := q.usageLocked(w.namespace).check(&limits, size); err != nil {
		reason = errs.Text(err)
	}
	return errs.Public(errs.ErrExhausted, fmt.Sprintf("%s; waited %s in the queue, and was number %d of %d", reason, waited.Round(100*time.Millisecond), position, of))
}
