// Package assumecache keeps objects that this process has written and that its informer cache may
// not show yet, as kube-scheduler's assume cache does: a write is assumed to be visible, and readers
// put it over what the cache shows. It never reads the API server, and an object that the cache shows
// in the same version or a newer one is the cache's again. An assumption that no event ends, such as
// that of an object which was created and deleted between two events, expires.
//
// Not assumed, because they are another idea:
//   - the picker's tombstones and places: they order events of a queue that is derived from the watch,
//     of objects that other processes wrote, too; and its unconfirmed writes have no known outcome;
//   - the quota's reservations: each begins before there is an object, and counts what others request;
//   - a warm pool's expectations: they count creations and deletions of which the names do not matter;
//   - a new API key: each of its uses is confirmed by a live read, so that a revoked key is refused.
//
// Its lock is held over nothing but its own maps and the caller's match function.
package assumecache

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// expiry bounds how long an object is assumed without an event that shows it.
const expiry = 2 * time.Minute

// Object is a pointer to an API type that can be copied.
type Object[T any] interface {
	*T
	client.Object
	DeepCopy() *T
}

// Cache holds the assumed objects of one kind. It is safe for concurrent use; its objects are copies.
type Cache[T any, P Object[T]] struct {
	shown Shown[P]

	mu      sync.Mutex
	assumed map[types.UID]assumption[P] // +checklocks:mu
	swept   time.Time                   // +checklocks:mu
}

// Shown reads an object from the informer cache.
type Shown[P any] func(ctx context.Context, key types.NamespacedName) (P, error)

// The caches in use.
type (
	// Sandboxes assumes sandboxes.
	Sandboxes = Cache[agents.Sandbox, *agents.Sandbox]
	// Claims assumes SandboxClaims.
	Claims = Cache[extensions.SandboxClaim, *extensions.SandboxClaim]
)

type assumption[P any] struct {
	object  P
	deleted bool
	since   time.Time
}

// New returns a cache that assumes nothing. shown reads the informer cache whose events Observe takes.
func New[T any, P Object[T]](shown Shown[P]) *Cache[T, P] {
	return &Cache[T, P]{shown: shown, assumed: map[types.UID]assumption[P]{}}
}

// Assume records an object as it was written, unless its event was faster than the response.
func (c *Cache[T, P]) Assume(ctx context.Context, object P) {
	c.put(object, false)
	if s, err := c.shown(ctx, client.ObjectKeyFromObject(object)); err == nil && s.GetUID() == object.GetUID() {
		c.Observe(nil, s)
	}
}

// AssumeDeleted records that an object was deleted.
func (c *Cache[T, P]) AssumeDeleted(object P) { c.put(object, true) }

func (c *Cache[T, P]) put(object P, deleted bool) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.swept) > expiry/2 {
		for uid, a := range c.assumed {
			if now.Sub(a.since) > expiry {
				delete(c.assumed, uid)
			}
		}
		c.swept = now
	}
	if was, ok := c.assumed[object.GetUID()]; ok && !deleted && (was.deleted || older(object, was.object)) {
		return
	}
	c.assumed[object.GetUID()] = assumption[P]{P(object.DeepCopy()), deleted, now}
}

// Forget ends the assumption about an object: a live read has shown it.
func (c *Cache[T, P]) Forget(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.assumed, uid)
}

// Observe takes an event of the informer cache: from is nil for a new object, to for a deleted one.
func (c *Cache[T, P]) Observe(from, to P) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if to == nil {
		delete(c.assumed, from.GetUID())
		return
	}
	if a, ok := c.assumed[to.GetUID()]; ok && ends(a, to) {
		delete(c.assumed, to.GetUID())
	}
}

// ends reports whether an object that the informer cache shows ends an assumption about it.
func ends[T any, P Object[T]](a assumption[P], shown P) bool {
	if a.deleted {
		return shown.GetDeletionTimestamp() != nil
	}
	return !older[T, P](shown, a.object)
}

// older reports whether an object is of an older version than another. Versions that cannot be compared
// are not.
func older[T any, P Object[T]](a, b P) bool {
	order, err := resourceversion.CompareResourceVersion(a.GetResourceVersion(), b.GetResourceVersion())
	return err == nil && order < 0
}

// Deleted reports whether an object is assumed to be deleted.
func (c *Cache[T, P]) Deleted(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.assumed[uid].deleted
}

// Has reports whether an object that matches, or its deletion, is assumed.
func (c *Cache[T, P]) Has(match func(P) bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range c.assumed {
		if match(a.object) && time.Since(a.since) <= expiry {
			return true
		}
	}
	return false
}

// Find returns an assumed object that matches; nil if there is none.
func (c *Cache[T, P]) Find(match func(P) bool) P {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range c.assumed {
		if !a.deleted && time.Since(a.since) <= expiry && match(a.object) {
			return P(a.object.DeepCopy())
		}
	}
	return nil
}

// Latest returns the newer of an object that the informer cache shows and the assumed one.
func (c *Cache[T, P]) Latest(shown P) P {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, ok := c.assumed[shown.GetUID()]
	if !ok || a.deleted {
		return shown
	}
	if ends(a, shown) || time.Since(a.since) > expiry { // its event ends the assumption: other readers may not have it yet
		return shown
	}
	return P(a.object.DeepCopy())
}

// Merge puts assumed objects over those that the informer cache shows, which must be all that match in
// it: newer ones replace, or leave where they no longer match; those that it lacks are added, and
// deleted ones are removed. It may change shown, and returns its objects as they are.
func (c *Cache[T, P]) Merge(shown []P, match func(P) bool) []P {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.assumed) == 0 {
		return shown
	}
	seen := map[types.UID]bool{}
	merged := shown[:0]
	for _, object := range shown {
		uid := object.GetUID()
		seen[uid] = true
		a, ok := c.assumed[uid]
		switch {
		case !ok || ends(a, object):
			merged = append(merged, object)
		case !a.deleted && match(a.object):
			merged = append(merged, a.object.DeepCopy())
		}
	}
	for uid, a := range c.assumed {
		if !seen[uid] && !a.deleted && time.Since(a.since) <= expiry && match(a.object) {
			merged = append(merged, a.object.DeepCopy())
		}
	}
	return merged
}
