package picker

import (
	"container/list"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// memberState is where a member is kept; see the package's diagram.
type memberState int

const (
	idle     memberState = iota // neither ready nor about to be
	making                      // becomes ready unless it fails
	ready                       // in a queue
	outdated                    // another writer changed it: its last seen state is not tried
	held                        // leased to one claim
	past                        // claimed or ended; kept until the event that shows it
)

// member is a sandbox that is or was an unclaimed member of a pool. All of it is guarded by
// the picker's mutex.
type member struct {
	seen  *agents.Sandbox // the newest that is known; shared, never changed
	key   key             // whose group counts it
	place memberState
	seq   uint64 // of those in a queue, the lowest goes first
	queue *nodeQueue
	at    *list.Element
	ended bool // it is no longer a member
	gone  bool // the object no longer exists
	// unconfirmed are the writes over the version seen whose outcome is unknown, and whose claims failed.
	unconfirmed []adoption
}

// adoption identifies one write that makes a member a claim's.
type adoption struct {
	at, request string
	owner       types.UID
}

func adoptionOf(s *agents.Sandbox) adoption {
	m := adoption{at: s.Annotations[pool.AnnotationClaimedAt], request: s.Annotations[pool.AnnotationIdempotencyKey]}
	if len(s.OwnerReferences) > 0 {
		m.owner = s.OwnerReferences[0].UID
	}
	return m
}

// matches reports whether an object is the result of an adoption.
func matches(s *agents.Sandbox, of adoption) bool {
	return pool.MemberOf(s) == "" && adoptionOf(s) == of
}

// over reports whether a sandbox can never be leased again.
func over(s *agents.Sandbox) bool { return pool.MemberOf(s) == "" || s.DeletionTimestamp != nil }

// placeOf returns the place of a member by its seen state.
func placeOf(s *agents.Sandbox) memberState {
	switch _, _, failed := sandbox.Failure(s); {
	case over(s):
		return past
	case pool.Spare(s):
		return ready
	case failed:
		return idle
	}
	if _, lacks := sandbox.LacksImage(s); lacks {
		return idle
	}
	if _, lacks := sandbox.LacksObject(s); lacks {
		return idle
	}
	if _, refused := sandbox.RefusedSecrets(s); refused {
		return idle
	}
	if phase := sandbox.PhaseOf(s); phase == sandbox.Pending || phase == sandbox.Starting {
		return making
	}
	return idle
}

// newer reports whether an object is a later state of the same one. Versions that cannot be compared
// count as ordered by their arrival.
func newer(s, than *agents.Sandbox) bool {
	order, err := resourceversion.CompareResourceVersion(s.ResourceVersion, than.ResourceVersion)
	if err != nil {
		return s.ResourceVersion != than.ResourceVersion
	}
	return order > 0
}

// Observe takes a change of any Sandbox, in any order and any number of times: to is nil when the sandbox
// is deleted, from is nil when it is new. It does not block, and keeps the objects unchanged.
func (p *Picker) Observe(from, to *agents.Sandbox) {
	s, gone := to, false
	if s == nil {
		s, gone = from, true
	}
	if s == nil {
		return
	}
	if orphan := p.observe(s, gone); orphan {
		p.orphaned(s)
	}
}

func (p *Picker) observe(s *agents.Sandbox, gone bool) (orphan bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.members[s.UID]
	switch ends := gone || over(s); {
	case p.tombstones.has(s.UID):
	case m == nil && ends:
		p.buryLocked(s, gone)
	case m == nil:
		m = &member{seen: s}
		p.members[s.UID] = m
		p.putLocked(m, placeOf(s))
	case ends:
		orphan = !gone && slices.ContainsFunc(m.unconfirmed, func(d adoption) bool { return matches(s, d) })
		m.gone = m.gone || gone
		p.forgetLocked(m, s)
	case m.place != past && newer(s, m.seen):
		p.seeLocked(m, s)
	}
	return orphan
}

// buryLocked records a former member that was never here.
//
// +checklocks:p.mu
func (p *Picker) buryLocked(s *agents.Sandbox, gone bool) {
	if pool.MemberOf(s) != "" || pool.OriginOf(s) != "" && s.Labels[agents.LabelLaunchType] == agents.LaunchWarm {
		p.tombstones.add(s.UID)
	}
	if at := barchan.ExactTime(s, pool.AnnotationClaimedAt); !gone && time.Since(at) < rivalTTL { // also those of before this process
		p.noteRivalLocked(s, at)
	}
}

// seeLocked records a later state of a member, and moves one that no claim holds to its place.
//
// +checklocks:p.mu
func (p *Picker) seeLocked(m *member, s *agents.Sandbox) {
	from := m.seen
	m.seen, m.unconfirmed = s, nil
	to := placeOf(s)
	stays := m.place == to && m.key == keyOf(s) && from.Status.NodeName == s.Status.NodeName
	if m.place != held && !stays {
		p.putLocked(m, to)
	}
}

// forgetLocked ends a member; a claim that holds it reads m.ended.
//
// +checklocks:p.mu
func (p *Picker) forgetLocked(m *member, s *agents.Sandbox) {
	if newer(s, m.seen) {
		m.seen = s
	}
	m.ended = true
	delete(p.members, s.UID)
	p.tombstones.add(s.UID)
	claimed := m.place != past && !m.gone && s.DeletionTimestamp == nil // by another process
	if claimed {
		p.noteRivalLocked(s, time.Now())
	}
	if m.place == held {
		return
	}
	p.putLocked(m, past)
	if g := p.groups[m.key]; claimed {
		p.noteLocked(g != nil && g.ready > 0)
	}
}

// noteRivalLocked records which process claimed a sandbox.
//
// +checklocks:p.mu
func (p *Picker) noteRivalLocked(s *agents.Sandbox, at time.Time) {
	if p.rivals.note(s.Annotations[pool.AnnotationClaimedBy], at) {
		p.rerankLocked()
	}
}

// +checklocks:p.mu
func (p *Picker) rerankLocked() {
	for _, g := range p.groups {
		g.rerank(p.rankLocked)
	}
}

// +checklocks:p.mu
func (p *Picker) rankLocked(m *member) int { return p.rivals.rank(m.seen.UID) }

func keyOf(s *agents.Sandbox) key {
	return key{pool.MemberOf(s), pool.TemplateKey(s), pool.RevisionOf(s)}
}

// putLocked moves a member to a place, and serves the claims that wait for one.
//
// +checklocks:p.mu
func (p *Picker) putLocked(m *member, to memberState) {
	was := m.key
	p.leaveLocked(m, to)
	m.place = to
	if to == making || to == ready || to == outdated {
		m.key = keyOf(m.seen)
	}
	g := p.groupLocked(m.key)
	switch to {
	case making:
		g.making++
	case ready:
		if m.seq == 0 {
			p.lastSeq++
			m.seq = p.lastSeq
		}
		g.add(m, p.rankLocked(m))
		p.metrics.ready.Inc()
	case outdated:
		m.at = g.outdated.PushBack(m)
	case idle, held, past:
	}
	p.balanceLocked(m.key)
	if was != m.key {
		p.balanceLocked(was)
	}
}

// leaveLocked takes a member from its place. One that was only held keeps its sequence number.
//
// +checklocks:p.mu
func (p *Picker) leaveLocked(m *member, to memberState) {
	g := p.groupLocked(m.key)
	switch m.place {
	case making:
		g.making--
	case ready:
		g.remove(m)
		p.metrics.ready.Dec()
	case outdated:
		g.outdated.Remove(m.at)
		m.at = nil
	case idle, held, past:
	}
	if to != held && to != ready {
		m.seq = 0
	}
}

// +checklocks:p.mu
func (p *Picker) groupLocked(k key) *group {
	g := p.groups[k]
	if g == nil {
		g = newGroup()
		p.groups[k] = g
	}
	return g
}

// balanceLocked gives ready members to waiting claims, first come first served, and ends the wait of
// those, newest first, for which no member is being created.
//
// +checklocks:p.mu
func (p *Picker) balanceLocked(k key) {
	g := p.groupLocked(k)
	for g.waiting.Len() > 0 {
		if m := g.best(); m != nil {
			p.leaveLocked(m, held)
			m.place = held
			g.leave(of[*waiter](g.waiting.Front()), m)
			continue
		}
		if g.waiting.Len() <= g.making {
			return
		}
		g.leave(of[*waiter](g.waiting.Back()), nil)
	}
	if g.empty() {
		delete(p.groups, k)
	}
}

// tombstones keeps the UIDs of the last members that ended, so that a late event does not restore them. A
// member restored past that bound fails at its write.
type tombstones struct {
	set  map[types.UID]struct{}
	ring []types.UID
	next int
}

// maxTombstones bounds them.
const maxTombstones = 4096

func (g *tombstones) has(uid types.UID) bool {
	_, dead := g.set[uid]
	return dead
}

func (g *tombstones) add(uid types.UID) {
	if g.has(uid) {
		return
	}
	if len(g.ring) < maxTombstones {
		g.ring = append(g.ring, uid)
	} else {
		delete(g.set, g.ring[g.next])
		g.ring[g.next] = uid
		g.next = (g.next + 1) % maxTombstones
	}
	g.set[uid] = struct{}{}
}
