package feeds

import (
	"maps"
	"sync"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Phases counts sandboxes by their phases, so that a status needs no list of all. Its zero value has none. It is safe for concurrent use.
type Phases struct {
	mu     sync.Mutex
	counts map[sandbox.Phase]int // +checklocks:mu
}

// Observe implements Observer.
func (p *Phases) Observe(older, newer *agents.Sandbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.counts == nil {
		p.counts = map[sandbox.Phase]int{}
	}
	if older != nil {
		was := sandbox.PhaseOf(older)
		if p.counts[was]--; p.counts[was] == 0 {
			delete(p.counts, was)
		}
	}
	if newer != nil {
		p.counts[sandbox.PhaseOf(newer)]++
	}
}

// Counts returns the number of sandboxes in each phase that has any.
func (p *Phases) Counts() map[sandbox.Phase]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.counts)
}
