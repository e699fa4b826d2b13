package controllers

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// startLimiter bounds concurrent reconciles of each group: starts of pool members, so that a filling pool does not take all workers
// and cores from claims, and all work for a namespace, whose agents and registries may be as slow as they like. A sandbox above the
// limit occupies no worker; it is enqueued again when a reconcile ends.
type startLimiter struct {
	// fits reports whether a group with own active reconciles, of all that there are, may have one more.
	fits func(own, all int) bool
	// groupOf is the group of a sandbox; nil: all are one.
	groupOf func(types.NamespacedName) string
	// longest is how long one keeps its slot; zero: until its reconcile ends.
	longest time.Duration

	mu     sync.Mutex
	groups map[string]*startGroup // +checklocks:mu
	// all counts the active ones of all groups.
	all   int // +checklocks:mu
	queue Queue
}

// startGroup is not empty.
type startGroup struct {
	active  map[types.NamespacedName]*time.Timer // that end a slot
	waiting []types.NamespacedName               // in order of arrival
	queued  sets.Set[types.NamespacedName]       // the same ones
}

func newStartLimiter(fits func(own, all int) bool, longest time.Duration, groupOf func(types.NamespacedName) string) *startLimiter {
	if groupOf == nil {
		groupOf = func(types.NamespacedName) string { return "" }
	}
	return &startLimiter{fits: fits, longest: longest, groupOf: groupOf, groups: map[string]*startGroup{}}
}

// Fits is the rule for the workers that namespaces share. A namespace that has none gets one, whatever others have. It gets more as long
// as it then has no more than share/(workers-share) of those that are left: alone its share, beside others that use many less. So few
// namespaces never keep all workers, and more than the configured number is at most one for each namespace.
func Fits(own, all, workers, share int) bool {
	return own == 0 || (own+1)*(workers-share) <= share*(workers-all)
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
		g = &startGroup{active: map[types.NamespacedName]*time.Timer{}, queued: sets.New[types.NamespacedName]()}
		l.groups[l.groupOf(key)] = g
	}
	if _, in := g.active[key]; in {
		return true
	}
	if l.fits(len(g.active), l.all) {
		l.beginLocked(g, key)
		return true
	}
	if !g.queued.Has(key) {
		g.queued.Insert(key)
		g.waiting = append(g.waiting, key)
	}
	return false
}

// beginLocked gives key a slot.
//
// +checklocks:l.mu
func (l *startLimiter) beginLocked(g *startGroup, key types.NamespacedName) {
	var over *time.Timer
	if l.longest > 0 {
		over = time.AfterFunc(l.longest, func() { l.release(key) })
	}
	g.active[key] = over
	l.all++
}

// release runs after every reconcile: it frees the slot of key, if any, gives what is free to those that wait, and enqueues them. A
// deleted one is enqueued too and releases in turn, so it blocks no other.
func (l *startLimiter) release(key types.NamespacedName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	g := l.groups[l.groupOf(key)]
	if g == nil {
		return
	}
	if over, in := g.active[key]; in {
		if over != nil {
			over.Stop()
		}
		delete(g.active, key)
		l.all--
	}
	if len(g.waiting) == 0 && len(g.active) == 0 {
		delete(l.groups, l.groupOf(key))
	}
	for g := l.nextLocked(); g != nil; g = l.nextLocked() {
		next := g.waiting[0]
		g.waiting = g.waiting[1:]
		g.queued.Delete(next)
		l.beginLocked(g, next)
		l.queue.Add(reconcile.Request{NamespacedName: next})
	}
}

// nextLocked returns the group with the fewest active ones of those that wait and may have one more, or nil.
//
// +checklocks:l.mu
func (l *startLimiter) nextLocked() (next *startGroup) {
	if l.queue == nil {
		return nil
	}
	for _, g := range l.groups {
		if len(g.waiting) > 0 && l.fits(len(g.active), l.all) && (next == nil || len(g.active) < len(next.active)) {
			next = g
		}
	}
	return next
}
