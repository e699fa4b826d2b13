package controllers

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// startLimiter bounds concurrent reconciles of each group: starts of pool members, so that a filling pool does not take all workers
// and cores from claims, and all work for a namespace, whose agents and registries may be as slow as they like. A sandbox above the
// limit occupies no worker; it is enqueued again when a reconcile of its group ends.
type startLimiter struct {
	limit int
	// groupOf is the group of a sandbox; nil: all are one.
	groupOf func(types.NamespacedName) string
	// longest is how long one keeps its slot; zero: until its reconcile ends.
	longest time.Duration

	mu     sync.Mutex
	groups map[string]*startGroup // +checklocks:mu
	queue  Queue
}

// startGroup is not empty.
type startGroup struct {
	active  map[types.NamespacedName]*time.Timer // that end a slot
	waiting []types.NamespacedName               // in order of arrival
}

func newStartLimiter(limit int, longest time.Duration, groupOf func(types.NamespacedName) string) *startLimiter {
	if groupOf == nil {
		groupOf = func(types.NamespacedName) string { return "" }
	}
	return &startLimiter{limit: limit, longest: longest, groupOf: groupOf, groups: map[string]*startGroup{}}
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

// acquire reports whether a sandbox may go on now. The end of its reconcile releases the slot.
func (l *startLimiter) acquire(key types.NamespacedName) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	g := l.groups[l.groupOf(key)]
	if g == nil {
		g = &startGroup{active: map[types.NamespacedName]*time.Timer{}}
		l.groups[l.groupOf(key)] = g
	}
	if _, in := g.active[key]; in {
		return true
	}
	if len(g.active) < l.limit {
		var over *time.Timer
		if l.longest > 0 {
			over = time.AfterFunc(l.longest, func() { l.release(key) })
		}
		g.active[key] = over
		return true
	}
	if !slices.Contains(g.waiting, key) {
		g.waiting = append(g.waiting, key)
	}
	return false
}

// release runs after every reconcile: it frees the slot of key, if any, and enqueues the next waiting sandbox of the group
// if a slot is free. A deleted one is enqueued too and releases in turn, so it blocks no other.
func (l *startLimiter) release(key types.NamespacedName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	g := l.groups[l.groupOf(key)]
	if g == nil {
		return
	}
	if over := g.active[key]; over != nil {
		over.Stop()
	}
	delete(g.active, key)
	if len(g.waiting) == 0 && len(g.active) == 0 {
		delete(l.groups, l.groupOf(key))
	}
	if len(g.active) >= l.limit || len(g.waiting) == 0 || l.queue == nil {
		return
	}
	next := g.waiting[0]
	g.waiting = g.waiting[1:]
	l.queue.Add(reconcile.Request{NamespacedName: next})
}
