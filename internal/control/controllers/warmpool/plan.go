package warmpool

import (
	"cmp"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// state is the state of a member.
type state int

const (
	starting     state = iota // not ready, or no longer
	waiting                   // no node has room for it
	startRefused              // refused until a setting changes
	ready                     // can be claimed if it is current
	failed                    // ended, or stuck
	ending                    // being deleted
)

// member is the part of a member that plan depends on.
type member struct {
	name     string
	uid      types.UID
	version  string // empty until the cache has it: it cannot be deleted before
	revision string // otherTemplate if it is not of the pool's template
	state    state
	created  time.Time
	since    time.Time // since when it is not ready, or being deleted; zero if it is ready
	note     string    // why it is not ready
}

// otherTemplate is no revision of any template.
const otherTemplate = "other"

// poolTarget is the desired state of a pool.
type poolTarget struct {
	desired     int
	surge       int           // additional members while stale ones are replaced
	unavailable int           // desired members that need not be ready meanwhile
	revision    string        // empty: none can be created
	recreate    bool          // else OnReplenish
	inUse       int           // living sandboxes of the revision, claimed through the pool
	hold        bool          // members fail: replace none for now
	probe       bool          // members fail: one at a time
	warming     bool          // their checkpoint is being created
	stuckAfter  time.Duration // as in Config
	goneAfter   time.Duration
}

// actions are the creates and deletes of a pass.
type actions struct {
	create int
	remove []member
}

// plan returns the next actions. They keep the limits of doc.go, and repeated passes reach the desired number of
// current members.
func plan(w poolTarget, members []member, now time.Time) actions {
	var a actions
	keep := make([]member, 0, len(members))
	endings := 0
	for _, m := range members {
		switch {
		case m.state == ending:
			endings++
		case m.state == failed && w.revision != "" && (!w.hold || m.revision != w.revision) && m.version != "",
			m.state == startRefused && w.stale(m) && m.version != "":
			a.remove = append(a.remove, m)
		default:
			keep = append(keep, m)
		}
	}
	slices.SortStableFunc(keep, w.byDeletionOrder)
	active := len(keep) + len(a.remove)
	keep = w.shrink(&a, keep)
	if w.revision == "" || w.hold || w.warming {
		return a
	}
	limit := w.desired // of members, those under deletion included
	if w.recreate {
		limit += w.surge
	}
	a.create = min(w.missing(keep), limit-active-w.counted(members, endings, now))
	if w.probe {
		a.create = min(a.create, 1-trying(w, keep))
	}
	a.create = max(a.create, 0)
	return a
}

// byDeletionOrder sorts the members to delete first to the front.
func (w poolTarget) byDeletionOrder(a, b member) int {
	return cmp.Or(
		-cmp.Compare(rank(a.state == failed), rank(b.state == failed)),
		-cmp.Compare(rank(w.stale(a)), rank(w.stale(b))),
		cmp.Compare(rank(a.state == ready), rank(b.state == ready)),
		b.created.Compare(a.created),
		cmp.Compare(a.name, b.name),
	)
}

func rank(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

func (w poolTarget) stale(m member) bool { return w.revision != "" && m.revision != w.revision }

// shrink moves members from keep, which is sorted, to the deletes, and returns the rest.
func (w poolTarget) shrink(a *actions, keep []member) []member {
	old, current, available := 0, 0, 0
	for _, m := range keep {
		if w.stale(m) {
			old++
		} else {
			current++
		}
		if m.state == ready {
			available++
		}
	}
	oldAllowed := 0
	if !w.recreate {
		oldAllowed = max(0, w.desired-max(current, min(w.desired, w.inUse)))
	}
	spare := available - max(0, w.desired-w.unavailable) // ready ones that a rollout may delete
	rest := keep[:0:0]
	for _, m := range keep {
		goes := false
		switch {
		case m.version == "":
		case !w.stale(m):
			if goes = current > w.desired; goes {
				current--
			}
		case old > oldAllowed && (!w.recreate || m.state != ready || spare > 0):
			goes = true
			old--
			if m.state == ready {
				spare--
			}
		}
		if goes {
			a.remove = append(a.remove, m)
		} else {
			rest = append(rest, m)
		}
	}
	return rest
}

// missing is how many current members to create, within the limit.
func (w poolTarget) missing(keep []member) int {
	n := w.desired
	for _, m := range keep {
		if !w.recreate || !w.stale(m) {
			n--
		}
	}
	return n
}

// counted is how many members under deletion count towards the limit.
func (w poolTarget) counted(members []member, endings int, now time.Time) int {
	late := 0
	for _, m := range members {
		if m.state == ending && now.Sub(m.since) >= w.goneAfter {
			late++
		}
	}
	return endings - min(late, w.desired)
}

// trying counts the current members that are starting.
func trying(w poolTarget, keep []member) (n int) {
	for _, m := range keep {
		if !w.stale(m) && (m.state == starting || m.state == waiting) {
			n++
		}
	}
	return n
}

// next is when a member's timeout changes the plan without an event; zero: never.
func next(w poolTarget, members []member, now time.Time) (at time.Time) {
	for _, m := range members {
		var end time.Time
		switch m.state {
		case starting:
			end = m.since.Add(w.stuckAfter)
		case ending:
			end = m.since.Add(w.goneAfter)
		case waiting, startRefused, ready, failed:
			continue
		}
		if end.After(now) {
			at = sooner(at, end)
		}
	}
	return at
}

// sooner is the earlier of two times; zero: never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}

// usage counts a pool's claims.
type usage struct {
	claimed int       // living sandboxes
	current int       // those of the current revision
	last    time.Time // when the last claim came; zero for never
}

// use counts the sandboxes that were claimed through a pool; known is the last claim so far.
func use(claimed []*agents.Sandbox, template types.NamespacedName, revision string, known time.Time) usage {
	u := usage{last: known}
	for _, s := range claimed {
		at := barchan.ExactTime(s, pool.AnnotationClaimedAt)
		if at.IsZero() {
			at = s.CreationTimestamp.Time
		}
		if at.After(u.last) {
			u.last = at
		}
		if sandbox.DeadForGood(s) {
			continue
		}
		u.claimed++
		if pool.RevisionFor(s, template) == revision {
			u.current++
		}
	}
	return u
}

// desired is the desired number of members, and when time alone may change it.
func desired(p *extensions.SandboxWarmPool, u usage, now time.Time) (n int, until time.Time) {
	b := p.Spec.Barchan
	if b == nil || b.Autoscale == nil {
		return int(*p.Spec.Replicas), time.Time{}
	}
	a := b.Autoscale
	low, most := int(a.MinReplicas), int(a.MaxReplicas)
	idle := u.last.Add(time.Duration(a.IdleSeconds) * time.Second)
	if u.last.IsZero() || !now.Before(idle) {
		return low, time.Time{}
	}
	share := int(a.SparePercent)
	n = (u.claimed*share + 99 - share) / (100 - share) // rounded up
	if n = min(max(n, low, 1), most); n > low {
		until = idle
	}
	return n, until
}

// bounds are the surge and the unavailability of a rollout, in members. One is positive, unless nothing is desired.
func bounds(p *extensions.SandboxWarmPool, desired int) (surge, unavailable int) {
	unavailable = desired
	if b := p.Spec.Barchan; b != nil {
		surge = share(b.MaxSurge, desired, true, 0)
		unavailable = share(b.MaxUnavailable, desired, false, desired)
	}
	if surge == 0 && unavailable == 0 { // small shares of few members
		unavailable = 1
	}
	return surge, min(unavailable, desired)
}

func share(v *intstr.IntOrString, of int, up bool, unset int) int {
	if v == nil {
		return unset
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(v, of, up)
	if err != nil { // validation excludes it
		return unset
	}
	return n
}
