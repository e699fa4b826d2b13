package dashboard

import (
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	maxSubscribers = 256
	// maxSteps bounds what is kept of one sandbox; the first half stays, of the rest the newest.
	maxSteps = 24
)

// step is a change of a sandbox that the watch has shown.
type step struct {
	at     time.Time
	phase  sandbox.Phase
	reason string // of a phase that waits
	member bool
}

// hub passes changes of sandboxes on to the pages that are open, and remembers when each came: objects keep seconds.
type hub struct {
	started time.Time

	mu    sync.Mutex
	pages map[*subscriber]struct{} // +checklocks:mu
	steps map[types.UID][]step     // +checklocks:mu
}

func newHub() *hub {
	return &hub{started: time.Now(), pages: map[*subscriber]struct{}{}, steps: map[types.UID][]step{}}
}

// subscriber has the sandboxes that one page has not been sent yet. It holds the cache's own objects, each once.
type subscriber struct {
	namespace string
	wake      chan struct{}

	mu      sync.Mutex
	changed map[types.UID]*agents.Sandbox // +checklocks:mu
	gone    []types.UID                   // +checklocks:mu
}

func (h *hub) observe(older, newer *agents.Sandbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if newer == nil {
		delete(h.steps, older.UID)
	} else {
		h.noteLocked(newer, older == nil && time.Since(newer.CreationTimestamp.Time) > 2*time.Second)
	}
	for p := range h.pages {
		p.add(older, newer)
	}
}

// noteLocked appends a step if the phase has changed. One that is as old as the process or its watch has no known time.
//
// +checklocks:h.mu
func (h *hub) noteLocked(s *agents.Sandbox, old bool) {
	now := step{at: time.Now(), phase: sandbox.PhaseOf(s), reason: waitReason(s), member: pool.MemberOf(s) != ""}
	if old {
		now.at = time.Time{}
	}
	all := h.steps[s.UID]
	if n := len(all); n > 0 {
		last := all[n-1]
		if last.phase == now.phase && last.reason == now.reason && last.member == now.member {
			return
		}
		if n >= maxSteps {
			all = append(all[:maxSteps/2], all[maxSteps/2+1:]...)
		}
	}
	h.steps[s.UID] = append(all, now)
}

func (h *hub) stepsOf(uid types.UID) []step {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.steps[uid])
}

// subscribe begins to collect changes in a namespace.
func (h *hub) subscribe(namespace string) (*subscriber, error) {
	p := &subscriber{namespace: namespace, wake: make(chan struct{}, 1), changed: map[types.UID]*agents.Sandbox{}}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.pages) >= maxSubscribers {
		return nil, errs.Public(errs.ErrExhausted, "too many pages are open; close some")
	}
	h.pages[p] = struct{}{}
	return p, nil
}

func (h *hub) unsubscribe(p *subscriber) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pages, p)
}

func (p *subscriber) add(older, newer *agents.Sandbox) {
	s := newer
	if s == nil {
		s = older
	}
	if s.Namespace != p.namespace {
		return
	}
	p.mu.Lock()
	if newer == nil {
		delete(p.changed, s.UID)
		p.gone = append(p.gone, s.UID)
	} else {
		p.changed[s.UID] = newer
	}
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// take returns what has changed since the last call.
func (p *subscriber) take() (changed map[types.UID]*agents.Sandbox, gone []types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed, gone = p.changed, p.gone
	p.changed, p.gone = map[types.UID]*agents.Sandbox{}, nil
	return changed, gone
}
