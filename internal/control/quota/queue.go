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

// waiter is a request in the queue of a namespace.
type waiter struct {
	// first receives while the request is the first of its queue: once when it becomes that, and whenever use has fallen.
	first chan struct{}
	place *list.Element // guarded by Quotas.mu
}

// Await is Hold for a request that may wait until there is room, for at most patience. Requests of a namespace are
// granted in the order of their calls; none overtakes one that needs more. Without room in time the error is an
// errs.ErrExhausted with the reason and the request's position; an errs.ErrTimeout if ctx ended.
func (q *Quotas) Await(ctx context.Context, req Request, patience time.Duration) (*Reservation, error) {
	w, err := q.enqueue(req.Namespace)
	if err != nil {
		return nil, err
	}
	defer q.leave(req.Namespace, w)
	expired := time.NewTimer(patience)
	defer expired.Stop()
	var again <-chan time.Time
	for {
		select {
		case <-w.first:
		case <-again:
		case <-expired.C:
			return nil, q.outOfPatience(ctx, req, w, patience)
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the quota of namespace %s: %w: %w", req.Namespace, errs.ErrTimeout, ctx.Err())
		}
		r, err := q.hold(ctx, req, true)
		if !errors.Is(err, errs.ErrExhausted) {
			return r, err
		}
		pause := recheck
		if errors.Is(err, errRate) {
			pause = rateRecheck
		}
		again = time.After(pause)
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

func (q *Quotas) enqueue(namespace string) (*waiter, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.usageLocked(namespace)
	if b.queue.Len() >= maxWaiting {
		return nil, errs.Public(errs.ErrExhausted, fmt.Sprintf("queue of the namespace: %d requests wait already, and no more may", maxWaiting))
	}
	w := &waiter{first: make(chan struct{}, 1)}
	w.place = b.queue.PushBack(w)
	if b.queue.Len() == 1 {
		b.wakeFirst()
	}
	return w, nil
}

// leave removes a request from its queue; the next one may be first now.
func (q *Quotas) leave(namespace string, w *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.usageLocked(namespace)
	b.queue.Remove(w.place)
	b.wakeFirst()
	b.deleteIfEmpty(q.namespaces, namespace)
}

// wakeFirst has the first request of the queue try again. It does not block.
func (b *namespaceUsage) wakeFirst() {
	if front := b.queue.Front(); front != nil {
		select {
		case front.Value.(*waiter).first <- struct{}{}: //nolint:forcetypeassert // the list has nothing else
		default: // it has not looked since the last time
		}
	}
}

// outOfPatience returns why a request was not granted in time.
func (q *Quotas) outOfPatience(ctx context.Context, req Request, w *waiter, patience time.Duration) error {
	limits, err := q.limits(ctx, req.Namespace)
	if err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.usageLocked(req.Namespace)
	position := 1
	for e := b.queue.Front(); e != nil && e != w.place; e = e.Next() {
		position++
	}
	reason := "room was free for a moment only"
	if err := b.check(&limits, req.Size); err != nil {
		reason = errs.Text(err)
	}
	return errs.Public(errs.ErrExhausted, fmt.Sprintf("%s; waited %s in the queue, and was number %d of %d", reason, patience.Round(100*time.Millisecond), position, b.queue.Len()))
}
