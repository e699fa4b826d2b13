package sandboxes

import (
	"context"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/google/btree"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/paging"
)

// listingLag bounds how long a wait for the cache also waits for the listing. A longer lag is no error.
const listingLag = time.Second

// listingDegree is the number of children of an inner node of the trees, at least.
const listingDegree = 32

// Listing has the sandboxes that lists show, in their order, and counts the running ones. So a page costs what its items cost, whatever
// the number of sandboxes is. It is safe for concurrent use.
type Listing struct {
	mu     sync.RWMutex
	of     map[string]*namespaceListing           // by namespace; +checklocks:mu
	seen   map[types.NamespacedName]listingEntry  // all sandboxes, also those that lists do not show; +checklocks:mu
	events map[types.NamespacedName]chan struct{} // closed at the next event of a sandbox; +checklocks:mu
}

// namespaceListing is guarded by the mutex of Listing.
type namespaceListing struct {
	order   *btree.BTreeG[listingEntry]
	running int
}

type listingEntry struct {
	at      paging.Cursor
	state   State // empty: lists do not show it
	sandbox *agents.Sandbox
}

// NewListing returns a listing of no sandboxes.
func NewListing() *Listing {
	return &Listing{of: map[string]*namespaceListing{}, seen: map[types.NamespacedName]listingEntry{}, events: map[types.NamespacedName]chan struct{}{}}
}

// Observe applies an event of the cache, in the order of the watch: older is nil for a new sandbox, newer for a deleted one. It keeps
// newer, which must not be changed.
func (l *Listing) Observe(older, newer *agents.Sandbox) {
	var e listingEntry
	s := older
	if newer != nil {
		s, e = newer, entryOf(newer)
	}
	key := client.ObjectKeyFromObject(s)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.removeLocked(key)
	if newer != nil {
		l.addLocked(key, e)
	}
	if event := l.events[key]; event != nil {
		close(event)
		delete(l.events, key)
	}
}

func entryOf(s *agents.Sandbox) listingEntry {
	e := listingEntry{at: positionOf(s), sandbox: s}
	if listed(s) {
		e.state = stateOf(sandbox.PhaseOf(s))
	}
	return e
}

// positionOf is the position of a sandbox in lists.
func positionOf(s *agents.Sandbox) paging.Cursor {
	return paging.Cursor{Key: pool.StartedAt(s).UnixNano(), ID: string(s.UID)}
}

// +checklocks:l.mu
func (l *Listing) removeLocked(key types.NamespacedName) {
	was, known := l.seen[key]
	delete(l.seen, key)
	if !known || was.state == "" {
		return
	}
	n := l.of[key.Namespace]
	n.order.Delete(was)
	if was.state == StateRunning {
		n.running--
	}
	if n.order.Len() == 0 {
		delete(l.of, key.Namespace)
	}
}

// +checklocks:l.mu
func (l *Listing) addLocked(key types.NamespacedName, e listingEntry) {
	l.seen[key] = e
	if e.state == "" {
		return
	}
	n := l.of[key.Namespace]
	if n == nil {
		n = &namespaceListing{order: btree.NewG(listingDegree, func(a, b listingEntry) bool { return a.at.Compare(b.at) < 0 })}
		l.of[key.Namespace] = n
	}
	n.order.ReplaceOrInsert(e)
	if e.state == StateRunning {
		n.running++
	}
}

// page returns the sandboxes of a namespace behind a cursor that states includes, at most limit, with the cursor of the next page, and
// the number of running ones.
func (l *Listing) page(namespace string, states func(State) bool, limit int, after *paging.Cursor, dir int) (items []*agents.Sandbox, next string, running int) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.of[namespace]
	if n == nil {
		return nil, "", 0
	}
	found, next := paging.Take(n.behind(after, dir, states), limit, dir, func(e listingEntry) paging.Cursor { return e.at })
	for _, e := range found {
		items = append(items, e.sandbox)
	}
	return items, next, n.running
}

// behind returns the entries behind a cursor in a direction; nil: all.
func (n *namespaceListing) behind(after *paging.Cursor, dir int, states func(State) bool) iter.Seq[listingEntry] {
	return func(yield func(listingEntry) bool) {
		visit := func(e listingEntry) bool {
			if !states(e.state) || after != nil && e.at == *after {
				return true
			}
			return yield(e)
		}
		switch {
		case after == nil && dir > 0:
			n.order.Ascend(visit)
		case after == nil:
			n.order.Descend(visit)
		case dir > 0:
			n.order.AscendGreaterOrEqual(listingEntry{at: *after}, visit)
		default:
			n.order.DescendLessOrEqual(listingEntry{at: *after}, visit)
		}
	}
}

// named returns the sandbox of a name; nil if there is none.
func (l *Listing) named(key types.NamespacedName) *agents.Sandbox {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.seen[key].sandbox
}

// Sandbox returns the sandbox of a name, shared with the listing: the caller must not change it. A missing one is an errs.ErrNotFound.
func (l *Listing) Sandbox(_ context.Context, key types.NamespacedName) (*agents.Sandbox, error) {
	if s := l.named(key); s != nil {
		return s, nil
	}
	return nil, fmt.Errorf("sandbox %s: %w", key, errs.ErrNotFound)
}

// await waits until the listing has a version of a sandbox or a newer one; nil: none of the name.
func (l *Listing) await(ctx context.Context, key types.NamespacedName, shown *agents.Sandbox) {
	ctx, cancel := context.WithTimeout(ctx, listingLag)
	defer cancel()
	for {
		event := l.unless(key, func(has *agents.Sandbox) bool {
			if has == nil || shown == nil {
				return has == shown
			}
			return has.UID != shown.UID || !behind(has, shown.ResourceVersion)
		})
		if event == nil {
			return
		}
		select {
		case <-event:
		case <-ctx.Done():
			return
		}
	}
}

// unless returns a channel that is closed at the next event of a sandbox, or nil if it is as it shall be.
func (l *Listing) unless(key types.NamespacedName, is func(*agents.Sandbox) bool) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if is(l.seen[key].sandbox) {
		return nil
	}
	if l.events[key] == nil {
		l.events[key] = make(chan struct{})
	}
	return l.events[key]
}

// Over returns a cache whose waits end when the listing shows what was waited for, too: its events may come a moment later.
func (l *Listing) Over(c Cache) Cache { return listedCache{c, l} }

type listedCache struct {
	Cache
	listing *Listing
}

// WaitSandbox implements Cache.
func (c listedCache) WaitSandbox(ctx context.Context, key types.NamespacedName, done func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error) {
	s, err := c.Cache.WaitSandbox(ctx, key, done)
	if err == nil {
		c.listing.await(ctx, key, s)
	}
	return s, err //nolint:wrapcheck // callers compare it
}
