package manager

import (
	"context"
	"sync"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// ahead knows the claims that are written and that the cache may not show yet. A claim is answered
// without a wait for the cache; whoever reads soon after it waits instead, so that everybody
// reads what was answered.
type unobservedClaims struct {
	mu     sync.Mutex
	claims map[sandbox.ID]written // +checklocks:mu
}

// written is a claim until the cache shows it, or has had its time to.
type written struct {
	namespace string
	shown     chan struct{}
}

// note remembers a claim until m's cache shows it. It does not block.
func (a *unobservedClaims) note(ctx context.Context, m *Manager, s *agents.Sandbox) {
	id, w := sandbox.IDOf(s.UID), written{s.Namespace, make(chan struct{})}
	a.mu.Lock()
	if a.claims == nil {
		a.claims = map[sandbox.ID]written{}
	}
	a.claims[id] = w
	a.mu.Unlock()
	go func() { // waitForAll waits for it
		m.settleAt(context.WithoutCancel(ctx), s) // it has a bound of its own
		a.mu.Lock()
		delete(a.claims, id)
		a.mu.Unlock()
		close(w.shown)
	}()
}

// waitForAll returns when all claims that are written by now can be read, or have had their time.
func (a *unobservedClaims) waitForAll(ctx context.Context) {
	a.wait(context.WithoutCancel(ctx), func(sandbox.ID, string) bool { return true })
}

// waitFor returns when the claims of a namespace that are written by now can be read.
func (a *unobservedClaims) waitFor(ctx context.Context, namespace string) {
	a.wait(ctx, func(_ sandbox.ID, in string) bool { return in == namespace })
}

// wait returns when the claims that match and are written by now can be read, or ctx is done.
func (a *unobservedClaims) wait(ctx context.Context, match func(id sandbox.ID, namespace string) bool) {
	a.mu.Lock()
	var all []written
	for id, w := range a.claims {
		if match(id, w.namespace) {
			all = append(all, w)
		}
	}
	a.mu.Unlock()
	for _, w := range all {
		select {
		case <-w.shown:
		case <-ctx.Done():
			return
		}
	}
}
