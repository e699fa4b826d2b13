package claim

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// attempt is the progress of a claim without an assigned sandbox. Only the worker of the claim uses it.
type attempt struct {
	claim types.UID
	// seen is the time of the first reconcile.
	seen time.Time
	// since is the time of the first reconcile without a user error, and waits the start of the wait for a
	// member.
	since, waits time.Time
	// blocked is the time of the first refusal by the quota; zero if it has refused nothing.
	blocked time.Time
	// unsure reports that a write of unknown outcome may have given the claim a sandbox: the API server is
	// read before another is taken.
	unsure bool
	// place is the claim's in the queue for the quota; nil if it is in none. granted reports that it has got the reservation
	// hold, which is nil without limits.
	place   *quota.Waiter
	granted bool
	hold    *quota.Reservation
	// reported is the time of the last write of the claim's position.
	reported time.Time
	// bound is the sandbox whose agent has taken the claim's variables.
	bound types.UID
}

// leaveQueue ends the claim's wait for the quota, and releases what it has got by it.
func (a *attempt) leaveQueue() {
	a.place.Leave()
	a.hold.Release()
	a.place, a.granted, a.hold = nil, false, nil
}

// waited returns what the claim has waited for until now: the quota first, then a member.
func (a *attempt) waited() (w pool.Waits) {
	until := time.Now()
	if !a.waits.IsZero() {
		w.Member, until = until.Sub(a.waits), a.waits
	}
	if !a.blocked.IsZero() {
		w.Quota = until.Sub(a.blocked)
	}
	return w
}

// block notes that the quota has refused the claim.
func (a *attempt) block() {
	if a.blocked.IsZero() {
		a.blocked = time.Now()
	}
}

// spend leaves the reservation to the sandbox that was written with it.
func (a *attempt) spend() { a.granted, a.hold = false, nil }

// attemptCache keeps attempts until their claims have a sandbox.
type attemptCache struct {
	mu       sync.Mutex
	attempts map[reconcile.Request]*attempt            // +checklocks:mu
	over     map[string]map[reconcile.Request]struct{} // +checklocks:mu
}

func newAttemptCache() *attemptCache {
	return &attemptCache{attempts: map[reconcile.Request]*attempt{}, over: map[string]map[reconcile.Request]struct{}{}}
}

// of returns the attempt of a claim.
func (m *attemptCache) of(req reconcile.Request, claim types.UID) *attempt {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := m.attempts[req]
	if a == nil || a.claim != claim {
		if a != nil {
			defer a.leaveQueue()
		}
		a = &attempt{seen: time.Now(), claim: claim}
		m.attempts[req] = a
	}
	return a
}

// forget ends the attempt of a claim that has a sandbox, or is deleted; it returns the claim's UID.
func (m *attemptCache) forget(req reconcile.Request) (claim types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a := m.attempts[req]; a != nil {
		claim = a.claim
		defer a.leaveQueue()
	}
	delete(m.attempts, req)
	delete(m.over[req.Namespace], req)
	if len(m.over[req.Namespace]) == 0 {
		delete(m.over, req.Namespace)
	}
	return claim
}

// refused records that a claim waits for its namespace's quota.
func (m *attemptCache) refused(req reconcile.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over[req.Namespace] == nil {
		m.over[req.Namespace] = map[reconcile.Request]struct{}{}
	}
	m.over[req.Namespace][req] = struct{}{}
}

// overQuota returns the claims that wait for the quota of a namespace, and ends their wait.
func (m *attemptCache) overQuota(namespace string) (all []reconcile.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for req := range m.over[namespace] {
		all = append(all, req)
	}
	delete(m.over, namespace)
	return all
}
