package route

import (
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// tombstoneTTL is longer than any delay of a writer.
	tombstoneTTL = 10 * time.Minute
	// maxTombstones bounds the memory; beyond it the oldest are dropped early.
	maxTombstones = 1 << 16
)

// tombstones are the tombstones of a table, swept by its writers. The zero value is ready.
type tombstones struct {
	stones map[sandbox.ID]tombstone
	// order has the expiries from old to new. An entry whose time differs from its tombstone's is
	// stale.
	order []tombstoneExpiry
}

type tombstone struct {
	version string
	final   bool // the object is gone: no version of it can be newer
	until   time.Time
	end     end
}

// end is why a sandbox has ended, shown to its tenant only.
type end struct{ namespace, why string }

// longestWhy bounds the length of a reason.
const longestWhy = 512

func endOf(s *agents.Sandbox) end {
	if !sandbox.DeadForGood(s) {
		return end{}
	}
	why := sandbox.EndOf(s)
	return end{s.Namespace, why[:min(len(why), longestWhy)]}
}

type tombstoneExpiry struct {
	id    sandbox.ID
	until time.Time
}

// add sets a tombstone, or renews it with a newer version. The first reason stays: later ones are
// about the object.
func (g *tombstones) add(id sandbox.ID, version string, final bool, e end, now time.Time) {
	if g.stones == nil {
		g.stones = map[sandbox.ID]tombstone{}
	}
	s := tombstone{version: version, final: final, until: now.Add(tombstoneTTL), end: e}
	if old, ok := g.stones[id]; ok {
		s.final = s.final || old.final
		if old.end.why != "" {
			s.end = old.end
		}
		if !newer(version, old.version) {
			s.version = old.version
		}
	}
	g.stones[id] = s
	g.order = append(g.order, tombstoneExpiry{id, s.until})
	for len(g.stones) > maxTombstones {
		g.drop()
	}
}

// blocks reports whether a tombstone forbids the version.
func (g *tombstones) blocks(id sandbox.ID, version string) bool {
	s, ok := g.stones[id]
	return ok && (s.final || !newer(version, s.version))
}

// remove removes the tombstone of a sandbox that a newer version has shown alive.
func (g *tombstones) remove(id sandbox.ID) { delete(g.stones, id) }

func (g *tombstones) sweep(now time.Time) {
	for len(g.order) > 0 && !now.Before(g.order[0].until) {
		g.drop()
	}
	// Stale entries are at most as many as the tombstones, plus a constant.
	if len(g.order) > 2*len(g.stones)+64 {
		kept := g.order[:0:0]
		for _, e := range g.order {
			if s, ok := g.stones[e.id]; ok && s.until.Equal(e.until) {
				kept = append(kept, e)
			}
		}
		g.order = kept
	}
}

// drop removes the oldest entry, and its tombstone if that was not renewed since.
func (g *tombstones) drop() {
	e := g.order[0]
	g.order = g.order[1:]
	if s, ok := g.stones[e.id]; ok && s.until.Equal(e.until) {
		delete(g.stones, e.id)
	}
}
