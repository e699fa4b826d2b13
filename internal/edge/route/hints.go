package route

import (
	"container/heap"
	"net/netip"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// HintTTL is how long a hint stands that the watch does not bear out. It is shorter than an
	// address rests after its release, so that no hint leads to who has it next.
	HintTTL = 30 * time.Second
	// disbeliefTTL is how long no hint is taken about a sandbox after one that came to nothing.
	disbeliefTTL = 10 * time.Minute
	// maxHints bounds the memory; beyond it the oldest go early.
	maxHints = 1 << 14
)

// hint is the newest thing that was said about a sandbox ahead of the watch.
type hint struct {
	id      sandbox.ID
	version string
	gone    bool  // it says that there is no route
	route   Route // else this one
	// own is the life of the route, where it is not the truth's.
	own *Epoch
	// until is when it ends, counted from the first hint that was not borne out.
	until time.Time
	// void: it came to nothing, and until the end of until nothing is taken about the sandbox.
	void    bool
	dropped bool
	at      int // place in hints.byVersion
}

// hints are those of a table. The zero value is ready.
type hints struct {
	of map[sandbox.ID]*hint
	// holder is who has an address by a hint that stands.
	holder    map[netip.Addr]sandbox.ID
	byVersion byVersion
	// standing and void are from old to new; what was dropped may still be in them.
	standing, void []*hint
}

// add takes a hint about a sandbox that has none.
func (h *hints) add(x *hint) {
	if h.of == nil {
		h.of, h.holder = map[sandbox.ID]*hint{}, map[netip.Addr]sandbox.ID{}
	}
	h.of[x.id] = x
	h.standing = append(tidy(h.standing, len(h.of)), x)
	h.hold(x)
	heap.Push(&h.byVersion, x)
}

// renew has the hint say what a newer one says. It does not stand any longer for that.
func (h *hints) renew(x, newer *hint) {
	h.release(x)
	if newer.gone || !sameLife(&x.route, &newer.route) {
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

// stands returns the hint about a sandbox, if there is one that is not void.
func (h *hints) stands(id sandbox.ID) *hint {
	if x := h.of[id]; x != nil && !x.void {
		return x
	}
	return nil
}

// oldest returns the oldest of a queue that was not dropped, nor made void if it is that of what
// stands.
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

// tidy removes what was dropped from a queue that is mostly that.
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

// Hint tells what a peer says of a sandbox, ahead of the watch: lookups see it at once. The truth
// beside it stays as it is. See the package on when a hint is refused, and on when it ends.
func (t *Table) Hint(r Route) bool {
	if r.ID != sandbox.IDOf(r.UID) || r.Address.IsValid() && !r.Address.IsGlobalUnicast() {
		return false
	}
	return t.hint(&hint{id: r.ID, version: r.ResourceVersion, route: r})
}

// HintDelete tells that a peer says a sandbox is dead for good as of a version. New lookups do not
// find it while the hint stands; the life of its route goes on until the truth ends it.
func (t *Table) HintDelete(id sandbox.ID, resourceVersion string) bool {
	return t.hint(&hint{id: id, version: resourceVersion, gone: true})
}

// Progress tells that the watch has passed a version: whatever happened to any object up to it has
// been applied. It ends the hints of that version and of older ones. Before MarkSynced it does
// nothing, for a first list is in no order.
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

// hint reports whether lookups see the hint from here on.
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
	if rival != nil && rival.id != x.id { // one of them is wrong, and nobody knows which
		t.rejectHint(w, rival)
		t.rejectHint(w, x)
		return false
	}
	t.show(w, x.id, w.byID.get(x.id).base())
	return true
}

// mayHint reports whether a hint is news, and contradicts nothing that the truth knows.
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

// supersedes reports whether a hint says more than the one there is.
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

// sweepHints ends those whose time is over.
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

// rejectHint ends a hint that came to nothing.
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

// sameObject reports whether two routes are of one object.
func sameObject(a, b *Route) bool {
	return a.ID == b.ID && a.UID == b.UID && a.Namespace == b.Namespace && a.Name == b.Name
}

// byVersion is a heap of hints, the one of the lowest version first.
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
