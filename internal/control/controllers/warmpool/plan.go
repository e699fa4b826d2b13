package warmpool

import (
	"cmp"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// state is what a member is good for.
type state int

const (
	starting     state = iota // not ready yet, or no more for a while
	waiting                   // no node has room for it
	startRefused              // may not start before somebody allows it
	ready                     // can be handed out if it is current
	failed                    // ended, or stuck
	ending                    // being deleted
)

// member is what decides about a member of a pool.
type member struct {
	name     string
	uid      types.UID
	version  string // empty if the cache has not seen it: then it cannot be deleted yet
	revision string
	state    state
	created  time.Time
	since    time.Time // since when it is not ready, or being deleted; zero if it is ready
	note     string    // why it is not ready
}

// poolTarget is what a pool should be.
type poolTarget struct {
	desired     int
	surge       int           // how many more may exist while stale ones are replaced
	unavailable int           // how many of the desired need not be ready meanwhile
	revision    string        // empty: none can be made
	recreate    bool          // else OnReplenish
	inUse       int           // living sandboxes of the revision, claimed through the pool
	hold        bool          // members fail: leave it at that for now
	probe       bool          // members fail: one at a time
	warming     bool          // what they are to start from is still being made
	stuckAfter  time.Duration // as in Config
	goneAfter   time.Duration
}

// actions is what to do now.
type actions struct {
	create int
	remove []member
}

// plan decides. It never lets more exist than doc.go says, and never makes fewer members ready
// than may be; done over and over, it leads to the desired number of current members.
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
	slices.SortStableFunc(keep, w.worstFirst)
	active := len(keep) + len(a.remove)
	keep = w.shrink(&a, keep)
	if w.revision == "" || w.hold || w.warming {
		return a
	}
	a.create = min(w.missing(keep), w.limit()-active-w.counted(members, endings, now))
	if w.probe {
		a.create = min(a.create, 1-trying(w, keep))
	}
	a.create = max(a.create, 0)
	return a
}

// byDeletionOrder orders members by who goes first.
func (w poolTarget) worstFirst(a, b member) int {
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

// shrink picks of keep, which is in order, what goes, and returns the rest.
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
	spare := available - max(0, w.desired-w.unavailable) // ready ones that may go in a rollout
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

// missing is how many current members are to be made, if there is room.
func (w poolTarget) missing(keep []member) int {
	n := w.desired
	for _, m := range keep {
		if !w.recreate || !w.stale(m) {
			n--
		}
	}
	return n
}

// limit is how many members may exist.
func (w poolTarget) limit() int {
	if w.recreate {
		return w.desired + w.surge
	}
	return w.desired
}

// counted is how many of the members that are being deleted take a place.
func (w poolTarget) counted(members []member, endings int, now time.Time) int {
	late := 0
	for _, m := range members {
		if m.state == ending && now.Sub(m.since) >= w.goneAfter {
			late++
		}
	}
	return endings - min(late, w.desired)
}

// trying is how many current members are on their way.
func trying(w poolTarget, keep []member) (n int) {
	for _, m := range keep {
		if !w.stale(m) && (m.state == starting || m.state == waiting) {
			n++
		}
	}
	return n
}

// next is when the members give reason to decide anew, without any event; zero for never.
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

// sooner is the earlier of two times, of which a zero one is never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
