package route

import (
	"iter"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Table maps sandbox IDs to routes. Its methods may be called from any goroutine; reads take no lock.
// Make one with NewTable.
type Table struct {
	current atomic.Pointer[snapshot]  // +checklocksignore
	synced  atomic.Bool               // +checklocksignore
	trusted atomic.Pointer[time.Time] // nil: for ever; +checklocksignore

	mu     sync.Mutex // writers only
	graves tombstones // +checklocks:mu
	hints  hints      // +checklocks:mu
	// held maps addresses to sandboxes, by base records.
	held map[netip.Addr]sandbox.ID // +checklocks:mu
	// passed is the version that the watch has passed for all objects.
	passed string // +checklocks:mu
}

// snapshot is immutable once it is current.
type snapshot struct {
	byID   ids
	byName names
	hidden int // routes deleted by a hint
}

// record is an entry as lookups return it, in one piece, because copying it is most of their work.
type record struct {
	Entry
	*recordMeta // nil until the record is published
}

// recordMeta is used by writers, and by lookups under a hint.
type recordMeta struct {
	changed chan struct{} // closed when the record is replaced or removed
	overlay *overlay      // nil: a base record
}

// shownAs makes a record ready for publication; v is the overlay that it shows, or nil.
func (r *record) shownAs(v *overlay) *record {
	r.recordMeta = &recordMeta{changed: make(chan struct{}), overlay: v}
	r.Changed, r.Hint = r.changed, v != nil
	return r
}

// overlay is a hint over a base record. It has no effect after its time, even before a writer removes
// it.
type overlay struct {
	base  *record // nil: there is none
	gone  bool
	until time.Time
}

// seen returns the record that is valid now, or nil.
func (r *record) seen() *record {
	if r == nil || !r.Hint {
		return r
	}
	return r.effective()
}

// effective returns the visible record under a hint.
func (r *record) effective() *record {
	switch {
	case !isBefore(&r.overlay.until):
		return r.overlay.base
	case r.overlay.gone:
		return nil
	default:
		return r
	}
}

// base returns the record without its hint, or nil.
func (r *record) base() *record {
	if r == nil || !r.Hint {
		return r
	}
	return r.overlay.base
}

// Entry is a route as it was at the time of the lookup. It never changes.
type Entry struct {
	Route
	// Epoch is the epoch; it ends when the route is no longer reachable as it is now. For an
	// unreachable route it has ended.
	Epoch *Epoch
	// Changed is closed as soon as the table has a newer state of this sandbox. The end of a hint's
	// time takes effect here with the next write, Progress included.
	Changed <-chan struct{}
	// Hint marks a route that is ahead of the base record.
	Hint bool
}

// NewTable returns an empty table that is not synced.
func NewTable() *Table {
	t := &Table{held: map[netip.Addr]sandbox.ID{}}
	t.current.Store(&snapshot{byID: newIDs(), byName: newNames()})
	return t
}

// Synced reports whether the table has applied the whole first list and may still be trusted. If not,
// a sandbox that it does not have may exist.
func (t *Table) Synced() bool { return t.synced.Load() && t.fresh() }

// TrustUntil sets when lookups by ID and by name stop to find anything, because addresses may have new
// owners. A later call moves the time, and may make hidden routes visible again. Without a call, or
// with the zero time, the table is always trusted.
func (t *Table) TrustUntil(at time.Time) {
	if at.IsZero() {
		t.trusted.Store(nil)
		return
	}
	t.trusted.Store(&at)
}

func (t *Table) fresh() bool {
	until := t.trusted.Load()
	return until == nil || isBefore(until)
}

// isBefore is separate so that its callers can be inlined.
func isBefore(at *time.Time) bool { return time.Now().Before(*at) }

// MarkSynced is called after every object of the first list has been applied.
func (t *Table) MarkSynced() { t.synced.Store(true) }

// Lookup finds a route by sandbox ID. The entry is shared and must not be changed: copying all of it
// takes longer than finding it.
func (t *Table) Lookup(id sandbox.ID) (*Entry, bool) {
	if t.fresh() {
		if rec := t.current.Load().byID.get(id).seen(); rec != nil {
			return &rec.Entry, true
		}
	}
	return nil, false
}

// Name returns the name of a sandbox's object, if the table has it.
func (t *Table) Name(id sandbox.ID) (types.NamespacedName, bool) {
	e, ok := t.Lookup(id)
	if !ok {
		return types.NamespacedName{}, false
	}
	return types.NamespacedName{Namespace: e.Namespace, Name: e.Name}, true
}

// LookupName finds the ID of the sandbox that has a name now. A hint applies only to names that no
// base record has.
func (t *Table) LookupName(namespace, name string) (sandbox.ID, bool) {
	now := t.current.Load()
	id := now.byName.get(fullName{namespace, name})
	if id == nil || !t.fresh() || now.byID.get(*id).seen() == nil {
		return "", false
	}
	return *id, true
}

// Len returns the number of routes at the last write.
func (t *Table) Len() int {
	now := t.current.Load()
	return now.byID.size - now.hidden
}

// All yields the routes of one snapshot, in no order.
func (t *Table) All() iter.Seq[Route] {
	now := t.current.Load()
	return func(yield func(Route) bool) {
		now.byID.each(func(_ idKey, rec *record) bool {
			rec = rec.seen()
			return rec == nil || yield(rec.Route)
		})
	}
}

// Apply records a version of an object: an upsert, or a delete if it is dead for good. It reports
// whether the table changed.
func (t *Table) Apply(s *agents.Sandbox) bool {
	r, keep := FromSandbox(s)
	if !keep {
		return newer(r.ResourceVersion, "") && t.remove(r.ID, r.ResourceVersion, false, endOf(s))
	}
	return t.Upsert(r)
}

// ApplyDelete records that the object is gone from the API server. UIDs are never reused, so this
// holds whatever version of the object the caller saw last.
func (t *Table) ApplyDelete(s *agents.Sandbox) bool {
	return t.remove(sandbox.IDOf(s.UID), s.ResourceVersion, true, endOf(s))
}

// Ended returns why a sandbox of a namespace ended, while its tombstone exists; else it is empty.
func (t *Table) Ended(namespace string, id sandbox.ID) (why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s, ok := t.graves.stones[id]; ok && s.end.namespace == namespace && time.Now().Before(s.until) {
		return s.end.why
	}
	return ""
}

// Upsert stores a route if it is strictly newer than the table's state of that sandbox, its tombstone
// included. A route without a well-formed version is rejected. If another sandbox has the same name,
// the older one is removed. If another has the same address, the older of the two versions loses it:
// it must not lead to the other sandbox.
func (t *Table) Upsert(r Route) bool {
	if !newer(r.ResourceVersion, "") {
		return false
	}
	w := &write{}
	defer w.finish() // after the lock is free
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begin(w)
	defer t.commit(w)
	return t.upsert(w, r)
}

// Delete removes a route unless the table has a newer version of it, and leaves a tombstone
// with the version.
func (t *Table) Delete(id sandbox.ID, resourceVersion string) bool {
	if !newer(resourceVersion, "") {
		return false
	}
	return t.remove(id, resourceVersion, false, end{})
}

func (t *Table) remove(id sandbox.ID, resourceVersion string, final bool, e end) bool {
	w := &write{}
	defer w.finish()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begin(w)
	defer t.commit(w)
	return t.deleteLocked(w, id, resourceVersion, final, e)
}

// write is the change that one writer makes.
type write struct {
	snapshot
	now     time.Time
	dirty   bool
	ended   []*Epoch
	changed []chan struct{}
}

// begin starts from the current snapshot, swept.
//
// +checklocks:t.mu
func (t *Table) begin(w *write) {
	w.snapshot, w.now = *t.current.Load(), time.Now()
	t.graves.sweep(w.now)
	t.sweepHints(w)
}

// commit publishes the changes at once.
//
// +checklocks:t.mu
func (t *Table) commit(w *write) {
	if w.dirty {
		t.current.Store(&w.snapshot)
	}
}

// finish notifies waiters and ends epochs.
func (w *write) finish() {
	for _, c := range w.changed {
		close(c)
	}
	for _, l := range w.ended {
		l.end()
	}
}

// +checklocks:t.mu
func (t *Table) upsert(w *write, r Route) bool {
	old := w.byID.get(r.ID).base()
	if t.graves.blocks(r.ID, r.ResourceVersion) || old != nil && !newer(r.ResourceVersion, old.ResourceVersion) {
		return false
	}
	name := nameOf(&r)
	if holder := w.byName.get(name); holder != nil && *holder != r.ID {
		if rival := w.byID.get(*holder).base(); rival != nil {
			if !newer(r.ResourceVersion, rival.ResourceVersion) {
				return false
			}
			t.deleteLocked(w, rival.ID, rival.ResourceVersion, true, end{})
		}
	}
	t.occupy(w, &r, old)
	h := t.hints.of[r.ID]
	truth := &record{Entry: Entry{Route: r, Epoch: t.epochOf(&r, old, h)}}
	if h != nil && (!newer(h.version, r.ResourceVersion) || !h.gone && !sameObject(&h.route, &r)) {
		t.hints.drop(h)
	}
	t.show(w, r.ID, truth)
	if holder := w.byName.get(name); holder == nil || *holder != r.ID {
		w.byName = w.byName.with(name, r.ID)
	}
	t.graves.remove(r.ID)
	return true
}

// epochOf returns the current epoch of the route, from its base record or a hint, or a new one.
//
// +checklocks:t.mu
func (t *Table) epochOf(r *Route, old *record, h *hint) *Epoch {
	switch {
	case !r.Reachable():
		return endedEpoch(r.EpochKey)
	case old != nil && sameEpoch(&old.Route, r):
		return old.Epoch
	case h != nil && h.own != nil && sameEpoch(&h.route, r):
		return h.own // effective treats it as the base record's from now on
	default:
		return newEpoch(r.EpochKey)
	}
}

// occupy gives the route its address, unless a newer version of another sandbox has it. Any older
// holder loses it.
//
// +checklocks:t.mu
func (t *Table) occupy(w *write, r *Route, old *record) {
	if old != nil && old.Address != r.Address {
		t.vacate(&old.Route)
	}
	if !r.Address.IsValid() || r.Address.IsLoopback() { // loopback addresses are shared
		return
	}
	if holder, taken := t.held[r.Address]; taken && holder != r.ID {
		rival := w.byID.get(holder).base()
		if !newer(r.ResourceVersion, rival.ResourceVersion) {
			r.Address = netip.Addr{}
			return
		}
		moved := rival.Route
		moved.Address = netip.Addr{}
		t.show(w, holder, &record{Entry: Entry{Route: moved, Epoch: endedEpoch(moved.EpochKey)}})
	}
	t.held[r.Address] = r.ID
	if id, taken := t.hints.holder[r.Address]; taken && id != r.ID {
		t.rejectHint(w, t.hints.of[id])
	}
}

// +checklocks:t.mu
func (t *Table) vacate(r *Route) {
	if t.held[r.Address] == r.ID {
		delete(t.held, r.Address)
	}
}

// deleteLocked reports whether there was a route to remove.
//
// +checklocks:t.mu
func (t *Table) deleteLocked(w *write, id sandbox.ID, resourceVersion string, final bool, e end) bool {
	old := w.byID.get(id).base()
	if old != nil && newer(old.ResourceVersion, resourceVersion) {
		if !final {
			return false
		}
		resourceVersion = old.ResourceVersion
	}
	t.graves.add(id, resourceVersion, final, e, w.now)
	if h := t.hints.of[id]; h != nil && (final || !newer(h.version, resourceVersion)) {
		t.hints.drop(h)
	}
	if old != nil {
		t.vacate(&old.Route)
	}
	had := w.byID.get(id) != nil
	t.show(w, id, nil)
	return had
}

// show publishes a base record, nil for none, or the hint over it. Epochs that are in neither end.
//
// +checklocks:t.mu
func (t *Table) show(w *write, id sandbox.ID, truth *record) {
	old := w.byID.get(id)
	if truth != nil {
		truth = (&record{Entry: Entry{Route: truth.Route, Epoch: truth.Epoch}}).shownAs(nil)
	}
	shown := t.veiled(id, truth)
	if old == nil && shown == nil {
		return
	}
	w.dirty = true
	w.hidden += shown.hides() - old.hides()
	w.retire(old, shown)
	w.retire(old.covered(), shown)
	if shown != nil {
		w.byID = w.byID.with(id, *shown)
		if name := nameOf(&shown.Route); w.byName.get(name) == nil {
			w.byName = w.byName.with(name, id)
		}
		return
	}
	w.byID = w.byID.without(id)
	name := nameOf(&old.Route)
	if holder := w.byName.get(name); holder != nil && *holder == id {
		w.byName = w.byName.without(name)
	}
}

// veiled returns a base record under the hint about its sandbox, or alone if there is no hint.
//
// +checklocks:t.mu
func (t *Table) veiled(id sandbox.ID, truth *record) *record {
	h := t.hints.stands(id)
	if h == nil || h.gone && truth == nil {
		return truth
	}
	rec := (&record{Entry: Entry{Route: h.route}}).shownAs(&overlay{base: truth, gone: h.gone, until: h.until})
	if h.gone {
		rec.Route, rec.Epoch = truth.Route, truth.Epoch
		return rec
	}
	if truth != nil {
		rec.Access, rec.Wake = truth.Access.narrowed(h.route.Access), truth.Wake
	}
	switch {
	case !h.route.Reachable():
		rec.Epoch = endedEpoch(h.route.EpochKey)
	case truth != nil && sameEpoch(&truth.Route, &h.route):
		rec.Epoch, h.own = truth.Epoch, nil
	default:
		if h.own == nil {
			h.own = newEpoch(h.route.EpochKey)
		}
		rec.Epoch = h.own
	}
	return rec
}

// covered returns the base record under a hint's record, or nil.
func (r *record) covered() *record {
	if r == nil || !r.Hint {
		return nil
	}
	return r.overlay.base
}

// hides returns 1 for a record that lookups do not see.
func (r *record) hides() int {
	if r == nil || !r.Hint || !r.overlay.gone {
		return 0
	}
	return 1
}

// retire notifies the holders of a record that is replaced.
func (w *write) retire(old, shown *record) {
	if old == nil {
		return
	}
	w.changed = append(w.changed, old.changed)
	if shown == nil || old.Epoch != shown.Epoch && (shown.covered() == nil || old.Epoch != shown.covered().Epoch) {
		w.ended = append(w.ended, old.Epoch)
	}
}

// sameEpoch reports whether two routes share an epoch.
func sameEpoch(a, b *Route) bool {
	return a.Reachable() && b.Reachable() && a.EpochKey == b.EpochKey && a.Address == b.Address
}

// newer compares versions as Kubernetes does. A malformed version is newer than none, and older than
// any well-formed one.
func newer(a, b string) bool {
	if order, err := resourceversion.CompareResourceVersion(a, b); err == nil {
		return order > 0
	}
	_, err := resourceversion.CompareResourceVersion(a, a)
	return err == nil
}
