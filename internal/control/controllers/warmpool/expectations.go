package warmpool

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

// ledgerPatience is how long the cache may take to show what was done before the API server
// itself is asked.
const ledgerPatience = 30 * time.Second

// ledger knows, by UID, what was done to pools' members and what the cache has not shown yet. A
// lagging cache therefore never leads to doing it twice. One pass at a time works on a pool.
type expectations struct {
	mu    sync.Mutex
	pages map[types.UID]*poolExpectations // by pool; +checklocks:mu
}

// poolExpectations is a ledger's part on one pool; guarded by its mutex.
type poolExpectations struct {
	made map[types.UID]member           // created, and not seen
	gone map[types.UID]expectedDeletion // deleted or taken, and seen as if not
	seen map[types.UID]struct{}         // what events told of since the pass began
	sure bool                           // nothing happened that is in neither ledger nor cache
}

type expectedDeletion struct {
	at     time.Time
	absent bool // no member any more; else being deleted
}

func newLedger() *expectations { return &expectations{pages: map[types.UID]*poolExpectations{}} }

// +checklocks:l.mu
func (l *expectations) pageLocked(uid types.UID) *poolExpectations {
	p := l.pages[uid]
	if p == nil {
		p = &poolExpectations{made: map[types.UID]member{}, gone: map[types.UID]expectedDeletion{}, seen: map[types.UID]struct{}{}}
		l.pages[uid] = p
	}
	return p
}

// entries is a page as it was before the cache was read: in this order, nothing is in neither.
type entries struct {
	made map[types.UID]member
	gone map[types.UID]expectedDeletion
	// ask says that the API server must be asked, for they do not tell all.
	ask bool
}

// open begins a pass over a pool.
func (l *expectations) open(uid types.UID, now time.Time) entries {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pageLocked(uid)
	clear(p.seen)
	e := entries{made: make(map[types.UID]member, len(p.made)), gone: make(map[types.UID]expectedDeletion, len(p.gone)), ask: !p.sure}
	for id, m := range p.made {
		e.made[id] = m
		e.ask = e.ask || now.Sub(m.since) > ledgerPatience
	}
	for id, f := range p.gone {
		e.gone[id] = f
		e.ask = e.ask || now.Sub(f.at) > ledgerPatience
	}
	return e
}

// settle forgets what is not needed any more. cached are the members as the
// cache had them after open.
func (l *expectations) settle(uid types.UID, cached map[types.UID]member) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pageLocked(uid)
	for id := range p.made {
		if _, shown := cached[id]; shown {
			delete(p.made, id)
		}
	}
	for id, f := range p.gone {
		if m, shown := cached[id]; !shown || (m.state == ending && !f.absent) {
			delete(p.gone, id)
		}
	}
}

// add notes a member that was created in this pass.
func (l *expectations) add(uid types.UID, m member) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pageLocked(uid)
	if _, shown := p.seen[m.uid]; !shown { // the event may overtake the answer
		m.version = ""
		p.made[m.uid] = m
	}
}

// removing notes that a member is about to be deleted, and spared that it was not.
func (l *expectations) removing(uid, id types.UID, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pageLocked(uid).gone[id] = expectedDeletion{at: now}
}

func (l *expectations) deletionFailed(uid, id types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pageLocked(uid).gone, id)
}

// doubt notes that something may have happened that nobody knows of: the next pass asks.
func (l *expectations) invalidate(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pageLocked(uid).sure = false
}

// forget drops a pool that is no more.
func (l *expectations) forget(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pages, uid)
}

// observe learns from an event that the cache has reached a sandbox. It must be called for
// every event, before anything that the event causes.
func (l *expectations) observe(s *agents.Sandbox) {
	uid := pool.MemberOf(s)
	if uid == "" {
		uid = pool.OriginOf(s)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.pages[uid]; p != nil {
		p.seen[s.UID] = struct{}{}
		delete(p.made, s.UID)
	}
}

// correct replaces a page by what the API server itself says, and the cache does not show.
func (l *expectations) correct(uid types.UID, cached, live map[types.UID]member, now time.Time) entries {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pageLocked(uid)
	clear(p.made)
	clear(p.gone)
	e := entries{made: map[types.UID]member{}, gone: map[types.UID]expectedDeletion{}}
	for id, m := range live {
		_, shown := cached[id]
		_, told := p.seen[id]
		switch {
		case !shown && !told:
			m.version, m.since = "", now
			p.made[id], e.made[id] = m, m
		case shown && m.state == ending && cached[id].state != ending:
			p.gone[id] = expectedDeletion{at: now}
			e.gone[id] = p.gone[id]
		}
	}
	for id := range cached {
		if _, there := live[id]; !there {
			p.gone[id] = expectedDeletion{at: now, absent: true}
			e.gone[id] = p.gone[id]
		}
	}
	p.sure = true
	return e
}

// over lays the entries over what the cache shows.
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
		if _, shown := cached[id]; !shown {
			all = append(all, m)
		}
	}
	return all
}
