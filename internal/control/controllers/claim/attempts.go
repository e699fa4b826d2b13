package claim

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// attempt is what this process knows of a claim and the cache may not show yet. It belongs to
// the worker that has the claim.
type attempt struct {
	claim types.UID
	// since is when the claim was first seen here without a fault of the user's, and waits since
	// when it has waited for a member.
	since, waits time.Time
	// unsure says that a write may have given the claim a sandbox that is not known here: the
	// API server is asked before another is taken.
	unsure bool
	// got is the sandbox that was taken last, as it was written; nil if none was.
	got *agents.Sandbox
	// gone are the sandboxes that were deleted; the cache may show them as if they were not.
	gone map[types.UID]bool
	// named is the claim as it was written with its sandbox in its status; nil if it was not.
	named *extensions.SandboxClaim
}

// attemptCache keeps attempts until the cache shows what came of them.
type attemptCache struct {
	mu       sync.Mutex
	attempts map[reconcile.Request]*attempt            // +checklocks:mu
	over     map[string]map[reconcile.Request]struct{} // +checklocks:mu
}

func newMemory() *attemptCache {
	return &attemptCache{attempts: map[reconcile.Request]*attempt{}, over: map[string]map[reconcile.Request]struct{}{}}
}

// of returns what is known of a claim.
func (m *attemptCache) of(who reconcile.Request, claim types.UID) *attempt {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := m.attempts[who]
	if a == nil || a.claim != claim {
		a = &attempt{claim: claim, gone: map[types.UID]bool{}}
		m.attempts[who] = a
	}
	return a
}

// forget drops what is known of a claim that is gone, or that the cache shows as it is.
func (m *attemptCache) forget(who reconcile.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.attempts, who)
	delete(m.over[who.Namespace], who)
	if len(m.over[who.Namespace]) == 0 {
		delete(m.over, who.Namespace)
	}
}

// refused notes that a claim waits for its namespace's quota.
func (m *attemptCache) refused(who reconcile.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over[who.Namespace] == nil {
		m.over[who.Namespace] = map[reconcile.Request]struct{}{}
	}
	m.over[who.Namespace][who] = struct{}{}
}

// overQuota returns the claims that wait for the quota of a namespace; they wait no more.
func (m *attemptCache) overQuota(namespace string) (all []reconcile.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for who := range m.over[namespace] {
		all = append(all, who)
	}
	delete(m.over, namespace)
	return all
}
