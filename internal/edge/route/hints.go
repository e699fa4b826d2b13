package route

import (
	"container/heap"
	"net/netip"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// HintTTL is how long an unconfirmed hint is valid. It is shorter than an address's cooling time
	// after its release, so that no hint leads to the next owner.
	HintTTL = 30 * time.Second
	// disbeliefTTL is how long further hints about a sandbox are rejected after an unconfirmed one.
	disbeliefTTL = 10 * time.Minute
	// maxHints bounds the memory; beyond it the oldest are dropped early.
	maxHints = 1 << 14
)

// hint is the newest state of a sandbox that peers pushed ahead of the watch.
type hint struct {
	id      sandbox.ID
	version string
	gone    bool  // there is no route
	route   Route // unless gone
	// own is the epoch of the route, unless it is the base record's.
	own *Epoch
	// until is the end, counted from the first unconfirmed hint.
	until time.Time
	// void: it expired unconfirmed, and further hints about the sandbox are rejected until then.
	void    bool
	dropped bool
	at      int // index in hints.byVersion
}

// hints are the hints of a table. The zero value is ready.
type hints struct {
	of map[sandbox.ID]*hint
	// holder maps an address to the sandbox that has it by a valid hint.
	holder    map[netip.Addr]sandbox.ID
	byVersion byVersion
	// standing and void are ordered from old to new, and may still contain dropped hints.
	standing, void []*hint
}

// add adds a hint about a sandbox that has none.
func (h *hints) add(x *hint) {
	if h.of == nil {
		h.of, h.holder = map[sandbox.ID]*hint{}, map[netip.Addr]sandbox.ID{}
	}
	h.of[x.id] = x
	h.standing = append(tidy(h.standing, len(h.of)), x)
	h.hold(x)
	heap.Push(&h.byVersion, x)
}

// renew replaces the content of a hint by a newer one's. Its end stays.
func (h *hints) renew(x, newer *hint) {
	h.release(x)
	if newer.gone || !sameEpoch(&x.route, &newer.route) {
		x.own = nil
	}
	x.version, x.gone, x.route = newer.version, newer.gone, newer.route
	h.hold(x)
	heap.Fix(&h.byVersion, x.at)
}

// rejectHint makes a hint void.
func (h *hints) rejectHint(x *hint, now time.Time) {
	h.release(x)
	x.void, x.until, x.own = true, now.Add(disbeliefTTL), nil
	h.void = append(tidy(h.void, len(h.of)), x)
}

func (h *hints) drop(x *hint) {
	h.release(x)
	x.dropped = true
	delete(h.of, x.id)
	heap.Remove(&h.byVersion, x.at)
}

func (h *hints) hold(x *hint) {
	if !x.void && !x.gone && x.route.Address.IsValid() {
		h.holder[x.route.Address] = x.id
	}
}

func (h *hints) release(x *hint) {
	if h.holder[x.route.Address] == x.id {
		delete(h.holder, x.route.Address)
	}
}

// stands returns the hint about a sandbox, unless there is none or it is void.
func (h *hints) stands(id sandbox.ID) *hint {
	if x := h.of[id]; x != nil && !x.void {
		return x
	}
	return nil
}

// oldest returns the oldest hint of a queue, without dropped ones and, in the queue of valid ones,
// without void ones.
func (h *hints) oldest(void bool) *hint {
	queue := &h.standing
	if void {
		queue = &h.void
	}
	for len(*queue) > 0 {
		if x := (*queue)[0]; !x.dropped && x.void == void {
			return x
		}
		*queue = (*queue)[1:]
	}
	return nil
}

// tidy compacts a queue that consists mostly of dropped hints.
func tidy(queue []*hint, live int) []*hint {
	if len(queue) <= 2*live+64 {
		return queue
	}
	kept := queue[:0:0]
	for _, x := range queue {
		if !x.dropped {
			kept = append(kept, x)
		}
	}
	return kept
}

// Hint applies a peer's route ahead of the watch: lookups see it at once. The base record stays. See
// the package on when a hint is rejected, and when it ends.
func (t *Table) Hint(r Route) bool {
	if r.ID != sandbox.IDOf(r.UID) || r.Address.IsValid() && !r.Address.IsGlobalUnicast() {
		return false
	}
	return t.hint(&hint{id: r.ID, version: r.ResourceVersion, route: r})
}

// HintDelete applies a peer's report that a sandbox is dead for good as of a version. New lookups do
// not find it while the hint is valid; the epoch of its route continues until a base record ends it.
func (t *Table) HintDelete(id sandbox.ID, resourceVersion string) bool {
	return t.hint(&hint{id: id, version: resourceVersion, gone: true})
}

// Progress records that the watch has passed a version: all changes of any object up to it have been
// applied. It ends the hints of that version and of older ones. Before MarkSynced it does nothing,
// because a first list is unordered.
func (t *Table) Progress(resourceVersion string) {
	if !t.synced.Load() {
		return
	}
	w := &write{}
	defer w.finish()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begin(w)
	defer t.commit(w)
	if !newer(resourceVersion, t.passed) {
		return
	}
	t.passed = resourceVersion
	for all := &t.hints.byVersion; len(*all) > 0 && !newer((*all)[0].version, resourceVersion); {
		t.dropHint(w, (*all)[0])
	}
}

// hint reports whether the hint was accepted.
func (t *Table) hint(x *hint) bool {
	if !newer(x.version, "") {
		return false
	}
	w := &write{}
	defer w.finish()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.begin(w)
	defer t.commit(w)
	if !t.mayHint(w, x) {
		return false
	}
	rival := t.hints.of[t.hints.holder[x.route.Address]]
	if have := t.hints.of[x.id]; have != nil {
		t.hints.renew(have, x)
		x = have
	} else {
		t.makeRoom(w)
		x.until = w.now.Add(HintTTL)
		t.hints.add(x)
	}
	if rival != nil && rival.id != x.id { // one of the two is wrong; which one is unknown
		t.rejectHint(w, rival)
		t.rejectHint(w, x)
		return false
	}
	t.show(w, x.id, w.byID.get(x.id).base())
	return true
}

// mayHint reports whether a hint is new and does not conflict with the base records.
//
// +checklocks:t.mu
func (t *Table) mayHint(w *write, x *hint) bool {
	if t.passed != "" && !newer(x.version, t.passed) || t.graves.blocks(x.id, x.version) {
		return false
	}
	if have := t.hints.of[x.id]; have != nil && (have.void || !x.supersedes(have)) {
		return false
	}
	truth := w.byID.get(x.id).base()
	if truth != nil && !newer(x.version, truth.ResourceVersion) {
		return false
	}
	if x.gone {
		return true
	}
	if truth != nil && !sameObject(&truth.Route, &x.route) {
		return false
	}
	holder, held := t.held[x.route.Address]
	return !held || holder == x.id
}

// supersedes reports whether a hint is newer than the existing one.
func (x *hint) supersedes(have *hint) bool {
	return newer(x.version, have.version) || x.gone && !have.gone && !newer(have.version, x.version)
}

// +checklocks:t.mu
func (t *Table) makeRoom(w *write) {
	for len(t.hints.of) >= maxHints {
		x := t.hints.oldest(true)
		if x == nil {
			x = t.hints.oldest(false)
		}
		t.dropHint(w, x)
	}
}

// sweepHints ends the expired hints.
//
// +checklocks:t.mu
func (t *Table) sweepHints(w *write) {
	for x := t.hints.oldest(false); x != nil && !w.now.Before(x.until); x = t.hints.oldest(false) {
		t.rejectHint(w, x)
	}
	for x := t.hints.oldest(true); x != nil && !w.now.Before(x.until); x = t.hints.oldest(true) {
		t.hints.drop(x)
	}
}

// rejectHint ends a hint that was not confirmed.
//
// +checklocks:t.mu
func (t *Table) rejectHint(w *write, x *hint) {
	t.hints.rejectHint(x, w.now)
	t.show(w, x.id, w.byID.get(x.id).base())
}

// +checklocks:t.mu
func (t *Table) dropHint(w *write, x *hint) {
	t.hints.drop(x)
	if !x.void {
		t.show(w, x.id, w.byID.get(x.id).base())
	}
}

// sameObject reports whether two routes belong to the same object.
func sameObject(a, b *Route) bool {
	return a.ID == b.ID && a.UID == b.UID && a.Namespace == b.Namespace && a.Name == b.Name
}

// byVersion is a heap of hints, the lowest version first.
type byVersion []*hint

// Len implements heap.Interface.
func (b byVersion) Len() int { return len(b) }

// Less implements heap.Interface.
func (b byVersion) Less(i, j int) bool { return newer(b[j].version, b[i].version) }

// Swap implements heap.Interface.
func (b byVersion) Swap(i, j int) {
	b[i], b[j] = b[j], b[i]
	b[i].at, b[j].at = i, j
}

// Push implements heap.Interface.
func (b *byVersion) Push(x any) {
	added := x.(*hint) //nolint:forcetypeassert // there is nothing else
	added.at = len(*b)
	*b = append(*b, added)
}

// Pop implements heap.Interface.
func (b *byVersion) Pop() any {
	last := len(*b) - 1
	x := (*b)[last]
	(*b)[last] = nil
	*b = (*b)[:last]
	return x
}
