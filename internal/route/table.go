package route

import (
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/resourceversion"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

// Table maps sandbox IDs to routes. Its methods may be called from any goroutine; those that
// read take no lock. Make one with NewTable.
type Table struct {
	current atomic.Pointer[snapshot] // +checklocksignore
	synced  atomic.Bool              // +checklocksignore

	mu     sync.Mutex // writers only
	graves graves     // +checklocks:mu
}

// snapshot is never changed once it is current.
type snapshot struct {
	byID   trie[sandbox.ID, *record]
	byName trie[fullName, sandbox.ID]
}

type fullName struct{ namespace, name string }

type record struct {
	route   Route
	life    *Life
	changed chan struct{} // closed when another record takes its place, or none
}

// Entry is a route as it was at the time of the lookup.
type Entry struct {
	Route
	// Life ends when the route stops to be reachable as it is now. That of a route which is not
	// reachable has ended.
	Life *Life
	// Changed is closed as soon as the table knows something newer about this sandbox.
	Changed <-chan struct{}
}

// NewTable returns an empty table that is not synced.
func NewTable() *Table {
	t := &Table{}
	t.current.Store(&snapshot{byID: newTrie[sandbox.ID, *record](), byName: newTrie[fullName, sandbox.ID]()})
	return t
}

// Synced reports whether the table has seen the whole truth once. Before that, a sandbox that it
// does not know may well exist.
func (t *Table) Synced() bool { return t.synced.Load() }

// MarkSynced is called after every object of the first list has been applied.
func (t *Table) MarkSynced() { t.synced.Store(true) }

// Lookup finds a route by sandbox ID.
func (t *Table) Lookup(id sandbox.ID) (Entry, bool) {
	rec, ok := t.current.Load().byID.get(id)
	if !ok {
		return Entry{}, false
	}
	return Entry{Route: rec.route, Life: rec.life, Changed: rec.changed}, true
}

// LookupName finds the ID of the sandbox that has a name now.
func (t *Table) LookupName(namespace, name string) (sandbox.ID, bool) {
	return t.current.Load().byName.get(fullName{namespace, name})
}

// Len is the number of routes.
func (t *Table) Len() int { return t.current.Load().byID.size }

// All yields the routes of one instant, in no order.
func (t *Table) All() iter.Seq[Route] {
	now := t.current.Load()
	return func(yield func(Route) bool) {
		now.byID.each(func(_ sandbox.ID, rec *record) bool { return yield(rec.route) })
	}
}

// Apply records what a version of an object says: an upsert, or a delete if it is dead for good.
// It reports whether the table changed.
func (t *Table) Apply(s *agents.Sandbox) bool {
	r, keep := FromSandbox(s)
	if !keep {
		return t.Delete(r.ID, r.ResourceVersion)
	}
	return t.Upsert(r)
}

// ApplyDelete records that the object is gone from the API server. An UID does not come back, so
// this holds whatever version of the object the caller saw last.
func (t *Table) ApplyDelete(s *agents.Sandbox) bool {
	return t.remove(sandbox.IDOf(s.UID), s.ResourceVersion, true)
}

// Upsert stores a route if it is strictly newer than what the table has of that sandbox, its
// tombstone included. A route without a well-formed version is refused. Where another sandbox
// has the same name, the newer one is right and the older one is gone.
func (t *Table) Upsert(r Route) bool {
	if !newer(r.ResourceVersion, "") {
		return false
	}
	ended, ok := t.upsert(r)
	for _, l := range ended {
		l.end()
	}
	return ok
}

// Delete removes a route unless the table has a newer version of it, and leaves a tombstone
// with the version.
func (t *Table) Delete(id sandbox.ID, resourceVersion string) bool {
	if !newer(resourceVersion, "") {
		return false
	}
	return t.remove(id, resourceVersion, false)
}

// upsert returns the lives that the caller must end after the lock is free.
func (t *Table) upsert(r Route) (ended []*Life, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.graves.sweep(time.Now())
	if t.graves.holds(r.ID, r.ResourceVersion) {
		return nil, false
	}
	now := *t.current.Load()
	old, had := now.byID.get(r.ID)
	if had && !newer(r.ResourceVersion, old.route.ResourceVersion) {
		return nil, false
	}
	name := fullName{r.Namespace, r.Name}
	if holder, taken := now.byName.get(name); taken && holder != r.ID {
		rival, _ := now.byID.get(holder)
		if !newer(r.ResourceVersion, rival.route.ResourceVersion) {
			return nil, false
		}
		now.byID = now.byID.without(holder)
		t.graves.dig(holder, rival.route.ResourceVersion, true, time.Now())
		defer close(rival.changed)
		ended = append(ended, rival.life)
	}
	rec := &record{route: r, changed: make(chan struct{})}
	switch {
	case had && r.Reachable() && old.route.Reachable() && old.route.LifeKey == r.LifeKey:
		rec.life = old.life
	case r.Reachable():
		rec.life = newLife(r.LifeKey)
	default:
		rec.life = endedLife(r.LifeKey)
	}
	if had {
		defer close(old.changed)
		if old.life != rec.life {
			ended = append(ended, old.life)
		}
	}
	now.byID = now.byID.with(r.ID, rec)
	now.byName = now.byName.with(name, r.ID)
	t.graves.open(r.ID)
	t.current.Store(&now)
	return ended, true
}

func (t *Table) remove(id sandbox.ID, resourceVersion string, final bool) bool {
	rec := t.bury(id, resourceVersion, final)
	if rec == nil {
		return false
	}
	rec.life.end()
	return true
}

// bury returns the record that it removed, if any.
func (t *Table) bury(id sandbox.ID, resourceVersion string, final bool) *record {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.graves.sweep(time.Now())
	now := *t.current.Load()
	rec, had := now.byID.get(id)
	if had && newer(rec.route.ResourceVersion, resourceVersion) {
		if !final {
			return nil
		}
		resourceVersion = rec.route.ResourceVersion
	}
	t.graves.dig(id, resourceVersion, final, time.Now())
	if !had {
		return nil
	}
	now.byID = now.byID.without(id)
	name := fullName{rec.route.Namespace, rec.route.Name}
	if holder, _ := now.byName.get(name); holder == id {
		now.byName = now.byName.without(name)
	}
	t.current.Store(&now)
	close(rec.changed)
	return rec
}

// newer compares as Kubernetes does. A version that is not well formed is newer than none, and
// any well-formed one is newer than it.
func newer(a, b string) bool {
	if order, err := resourceversion.CompareResourceVersion(a, b); err == nil {
		return order > 0
	}
	_, err := resourceversion.CompareResourceVersion(a, a)
	return err == nil
}
