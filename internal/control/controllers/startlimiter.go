package controllers

import (
	"context"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// startLimiter bounds concurrent starts of pool members, so that a filling pool does not take all workers
// and cores from claims. A member above the limit occupies no worker; it is enqueued again when a start ends.
type startLimiter struct {
	limit int

	mu      sync.Mutex
	active  map[types.NamespacedName]struct{} // +checklocks:mu
	waiting []types.NamespacedName            // in order of arrival; +checklocks:mu
	queue   Queue
}

func newStartLimiter(limit int) *startLimiter {
	return &startLimiter{limit: limit, active: map[types.NamespacedName]struct{}{}}
}

// source stores the queue of the controller and emits nothing.
func (l *startLimiter) source() source.Source {
	return source.Func(func(_ context.Context, queue Queue) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.queue = queue
		return nil
	})
}

// acquire reports whether a member may start now. The end of its reconcile releases the slot.
func (l *startLimiter) acquire(key types.NamespacedName) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, in := l.active[key]; in || len(l.active) < l.limit {
		l.active[key] = struct{}{}
		return true
	}
	if !slices.Contains(l.waiting, key) {
		l.waiting = append(l.waiting, key)
	}
	return false
}

// release runs after every reconcile: it frees the slot of key, if any, and enqueues the next waiting member
// if a slot is free. A deleted member is enqueued too and releases in turn, so it blocks no other.
func (l *startLimiter) release(key types.NamespacedName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.active, key)
	if len(l.active) >= l.limit || len(l.waiting) == 0 || l.queue == nil {
		return
	}
	next := l.waiting[0]
	l.waiting = l.waiting[1:]
	l.queue.Add(reconcile.Request{NamespacedName: next})
}
