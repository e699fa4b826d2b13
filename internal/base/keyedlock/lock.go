// Package keyedlock has the lock by key: changes to a sandbox, or to a checkpoint, hold the lock of its UID, and steps of
// template builds that of a cache. A removal interrupts the holder and the callers before it. The package
// decides nothing about what a lock protects, and it keeps no object of a key.
//
// Lock.mu is held for no call out of this package.
package keyedlock

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// ErrInterrupted is the cause of a context that an interrupting acquire ended.
var ErrInterrupted = errors.New("interrupted by a request to remove it")

// Lock serializes changes of the object of a key, in the order of arrival. A removal
// interrupts: it cancels the context of the holder and of all callers that wait before it, and these never
// get the lock. The zero value is ready.
type Lock[K comparable] struct {
	mu sync.Mutex
	// queues have the holder first.
	queues map[K][]*ticket // +checklocks:mu
}

// ticket is the holder of the lock of a key, or a caller that waits for it.
type ticket struct {
	granted     chan struct{}
	cancel      []context.CancelCauseFunc // guarded by Lock.mu
	interrupts  bool
	interrupted bool // guarded by Lock.mu
}

// Acquire waits for the lock of a key. With interrupts it interrupts all callers before it, except those
// that interrupt too. An interruption cancels the returned context; release passes the
// lock to the next caller. The error is the cause of the end of the wait.
func (l *Lock[K]) Acquire(ctx context.Context, key K, interrupts bool) (_ context.Context, release func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	t := &ticket{granted: make(chan struct{}), cancel: []context.CancelCauseFunc{cancel}, interrupts: interrupts}
	l.enqueue(key, t)
	release = func() {
		cancel(nil)
		l.dequeue(key, t)
	}
	select {
	case <-t.granted:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		cause := context.Cause(ctx)
		release()
		return nil, nil, cause
	}
	return ctx, release, nil
}

func (l *Lock[K]) enqueue(key K, t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.queues == nil {
		l.queues = map[K][]*ticket{}
	}
	if t.interrupts {
		for _, before := range l.queues[key] {
			before.interrupt()
		}
	}
	if l.queues[key] = append(l.queues[key], t); len(l.queues[key]) == 1 {
		close(t.granted)
	}
}

func (l *Lock[K]) dequeue(key K, t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.queues[key][0]
	left := slices.DeleteFunc(l.queues[key], func(o *ticket) bool { return o == t })
	switch {
	case len(left) == 0:
		delete(l.queues, key)
		return
	case was == t:
		close(left[0].granted)
	}
	l.queues[key] = left
}

// interrupt cancels the contexts of the ticket. The caller holds Lock.mu.
func (t *ticket) interrupt() {
	if t.interrupts {
		return
	}
	t.interrupted = true
	for _, cancel := range t.cancel {
		cancel(ErrInterrupted)
	}
}

// UnlessInterrupted derives from the holder's context one that an interruption of the holder cancels, and
// that the end of its caller's context does not cancel.
func (l *Lock[K]) UnlessInterrupted(held context.Context, key K) (_ context.Context, done context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(held))
	l.mu.Lock()
	defer l.mu.Unlock()
	holder := l.queues[key][0]
	holder.cancel = append(holder.cancel, cancel)
	if holder.interrupted {
		cancel(ErrInterrupted)
	}
	return ctx, func() { cancel(nil) }
}

// Holder reports whether the lock of a key is held, and whether its holder was interrupted.
func (l *Lock[K]) Holder(key K) (held, interrupted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queues[key]) == 0 {
		return false, false
	}
	return true, l.queues[key][0].interrupted
}
