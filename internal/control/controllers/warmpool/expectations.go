package warmpool

import (
	"cmp"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

// expectationTimeout is how long the cache may lag before a pass reads the API server.
const expectationTimeout = 30 * time.Second

// expectations are the writes to pools' members that the cache has not shown yet, by UID, so that a lagging cache
// repeats none. One pass at a time works on a pool.
type expectations struct {
	mu    sync.Mutex
	pools map[types.UID]*poolExpectations // by pool; +checklocks:mu
}

// poolExpectations are those of one pool; guarded by expectations.mu.
type poolExpectations struct {
	made map[types.UID]member           // created, and not seen
	gone map[types.UID]expectedDeletion // deleted or taken, and seen as if not
	seen map[types.UID]struct{}         // in events since the pass began
	sure bool                           // expectations and cache together are complete
}

type expectedDeletion struct {
	at     time.Time
	absent bool // no member any more; else being deleted
}

func newExpectations() *expectations { return &expectations{pools: map[types.UID]*poolExpectations{}} }

// update calls do with the expectations of a pool, under the lock.
func (l *expectations) update(uid types.UID, do func(p *poolExpectations)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	do(l.poolLocked(uid))
}

// +checklocks:l.mu
func (l *expectations) poolLocked(uid types.UID) *poolExpectations {
	p := l.pools[uid]
	if p == nil {
		p = &poolExpectations{made: map[types.UID]member{}, gone: map[types.UID]expectedDeletion{}, seen: map[types.UID]struct{}{}}
		l.pools[uid] = p
	}
	return p
}

// entries are expectations from before the read of the cache, so that together they are complete.
type entries struct {
	made map[types.UID]member
	gone map[types.UID]expectedDeletion
	// read requires a read of the API server: the entries are incomplete.
	read bool
}

// open begins a pass over a pool.
func (l *expectations) open(uid types.UID, now time.Time) entries {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.poolLocked(uid)
	clear(p.seen)
	e := entries{made: maps.Clone(p.made), gone: maps.Clone(p.gone), read: !p.sure}
	for _, m := range p.made {
		e.read = e.read || now.Sub(m.since) > expectationTimeout
	}
	for _, f := range p.gone {
		e.read = e.read || now.Sub(f.at) > expectationTimeout
	}
	return e
}

// settle drops the expectations that the cache has met. cached are the members as read after open.
func (l *expectations) settle(uid types.UID, cached map[types.UID]member) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.poolLocked(uid)
	maps.DeleteFunc(p.made, func(id types.UID, _ member) bool { return has(cached, id) })
	maps.DeleteFunc(p.gone, func(id types.UID, f expectedDeletion) bool {
		m, shown := cached[id]
		return !shown || (m.state == ending && !f.absent)
	})
}

// add expects a member that this pass created.
func (l *expectations) add(uid types.UID, m member) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.poolLocked(uid)
	if !has(p.seen, m.uid) { // the event may precede the response
		m.version = ""
		p.made[m.uid] = m
	}
}

// removing expects a deletion before its request, and deletionFailed ends that.
func (l *expectations) removing(uid, id types.UID, now time.Time) {
	l.update(uid, func(p *poolExpectations) { p.gone[id] = expectedDeletion{at: now} })
}

func (l *expectations) deletionFailed(uid, id types.UID) {
	l.update(uid, func(p *poolExpectations) { delete(p.gone, id) })
}

// invalidate has the next pass read the API server, after a request with an unknown result.
func (l *expectations) invalidate(uid types.UID) {
	l.update(uid, func(p *poolExpectations) { p.sure = false })
}

// forget drops a deleted pool.
func (l *expectations) forget(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pools, uid)
}

// observe handles the event of a sandbox. The caller calls it for every event, before it enqueues.
func (l *expectations) observe(s *agents.Sandbox) {
	uid := cmp.Or(pool.MemberOf(s), pool.OriginOf(s))
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.pools[uid]; p != nil {
		p.seen[s.UID] = struct{}{}
		delete(p.made, s.UID)
	}
}

// correct replaces the expectations of a pool by the difference between API server and cache.
func (l *expectations) correct(uid types.UID, cached, live map[types.UID]member, now time.Time) entries {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.poolLocked(uid)
	clear(p.made)
	clear(p.gone)
	for id, m := range live {
		switch old, shown := cached[id]; {
		case !shown && !has(p.seen, id):
			m.version, m.since = "", now
			p.made[id] = m
		case shown && m.state == ending && old.state != ending:
			p.gone[id] = expectedDeletion{at: now}
		}
	}
	for id := range cached {
		if !has(live, id) {
			p.gone[id] = expectedDeletion{at: now, absent: true}
		}
	}
	p.sure = true
	return entries{made: maps.Clone(p.made), gone: maps.Clone(p.gone)}
}

// over applies the entries to the members in the cache.
func (e entries) over(cached map[types.UID]member) []member {
	all := make([]member, 0, len(cached)+len(e.made))
	for id, m := range cached {
		f, left := e.gone[id]
		if left && f.absent {
			continue
		}
		if left && m.state != ending {
			m.state, m.since = ending, f.at
		}
		all = append(all, m)
	}
	for id, m := range e.made {
		if !has(cached, id) {
			all = append(all, m)
		}
	}
	return all
}

func has[V any](m map[types.UID]V, id types.UID) bool {
	_, ok := m[id]
	return ok
}
