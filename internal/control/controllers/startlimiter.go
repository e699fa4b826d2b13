package controllers

import (
	"context"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// gate lets few members of pools start at once. A pool that fills would otherwise take every
// worker and every core from those who wait for a sandbox now. Who finds it closed is
// reconciled again when somebody has left; nobody holds a worker meanwhile.
type startLimiter struct {
	most int // at once

	mu      sync.Mutex
	inside  map[types.NamespacedName]struct{} // +checklocks:mu
	waiting []types.NamespacedName            // first come first; +checklocks:mu
	queue   workqueue.TypedRateLimitingInterface[reconcile.Request]
}

func newGate(most int) *startLimiter {
	return &startLimiter{most: most, inside: map[types.NamespacedName]struct{}{}}
}

// source only learns where to queue those whose turn has come.
func (g *startLimiter) source() source.Source {
	return source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.queue = queue
		return nil
	})
}

// enter reports whether a member may start now. The end of its reconcile takes it out.
func (g *startLimiter) enter(key types.NamespacedName) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, in := g.inside[key]; in || len(g.inside) < g.most {
		g.inside[key] = struct{}{}
		return true
	}
	if !slices.Contains(g.waiting, key) {
		g.waiting = append(g.waiting, key)
	}
	return false
}

// pass ends a reconcile of anything: it takes out who was inside, and calls the next if there is room.
// Whoever is called passes too, so that one who has gone meanwhile holds nobody up.
func (g *startLimiter) pass(key types.NamespacedName) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.inside, key)
	if len(g.inside) >= g.most || len(g.waiting) == 0 || g.queue == nil {
		return
	}
	next := g.waiting[0]
	g.waiting = g.waiting[1:]
	g.queue.Add(reconcile.Request{NamespacedName: next})
}
