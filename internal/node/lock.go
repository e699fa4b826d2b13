package node

import (
	"context"
	"errors"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// errInterrupted is the cause of a context that an interrupting acquire ended.
var errInterrupted = errors.New("interrupted by a request to remove it")

// keyedLock serializes what is done to the object of a UID, in the order of arrival. A removal
// interrupts: it ends the context of the holder and of all that wait before it, and these never
// hold the lock. Its zero value is ready.
type keyedLock struct {
	mu sync.Mutex
	// queues have the holder first.
	queues map[types.UID][]*ticket // +checklocks:mu
}

// ticket is one holder of the lock of a key, or one that waits for it.
type ticket struct {
	granted     chan struct{}
	cancel      []context.CancelCauseFunc // guarded by keyedLock.mu
	interrupts  bool
	interrupted bool // guarded by keyedLock.mu
}

// acquire waits for the lock of a key. With interrupts it interrupts all before it, but for those
// that interrupt too. The context that it returns ends with an interruption; release gives the
// lock to the next. The error is the cause of the end of the wait.
func (l *keyedLock) acquire(ctx context.Context, key types.UID, interrupts bool) (_ context.Context, release func(), err error) {
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

func (l *keyedLock) enqueue(key types.UID, t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.queues == nil {
		l.queues = map[types.UID][]*ticket{}
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

func (l *keyedLock) dequeue(key types.UID, t *ticket) {
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

// interrupt ends what the ticket stands for. The lock's mutex is held.
func (t *ticket) interrupt() {
	if t.interrupts {
		return
	}
	t.interrupted = true
	for _, cancel := range t.cancel {
		cancel(errInterrupted)
	}
}

// unlessInterrupted makes of the holder's context one that ends when the holder is interrupted, and
// not when its caller gives up.
func (l *keyedLock) unlessInterrupted(held context.Context, key types.UID) (_ context.Context, done context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(held))
	l.mu.Lock()
	defer l.mu.Unlock()
	holder := l.queues[key][0]
	holder.cancel = append(holder.cancel, cancel)
	if holder.interrupted {
		cancel(errInterrupted)
	}
	return ctx, func() { cancel(nil) }
}

// busy reports whether the lock of a key is held.
func (l *keyedLock) busy(key types.UID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queues[key]) > 0
}
