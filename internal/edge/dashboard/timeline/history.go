package timeline

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// maxSteps bounds what is kept of one sandbox; the first half stays, of the rest the newest.
	maxSteps = 24
	// newFor is the age below which a sandbox that the watch shows first has been created since the watch began.
	newFor = 2 * time.Second
)

// step is a change of a sandbox that the watch has shown. The zero time is unknown.
type step struct {
	at     time.Time
	phase  sandbox.Phase
	reason string // of a phase that waits
	member bool
}

// History records when the watch showed each change of phase, because objects keep seconds. It is safe for concurrent use.
type History struct {
	since time.Time

	mu    sync.Mutex
	steps map[types.UID][]step // +checklocks:mu
}

// NewHistory returns an empty history, which begins now.
func NewHistory() *History { return &History{since: time.Now(), steps: map[types.UID][]step{}} }

// Observe receives each change of a sandbox, in order: newer is nil for a deleted one, older for a new one.
func (h *History) Observe(older, newer *agents.Sandbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if newer == nil {
		delete(h.steps, older.UID)
		return
	}
	now := step{at: time.Now(), phase: sandbox.PhaseOf(newer), reason: WaitReason(newer), member: pool.MemberOf(newer) != ""}
	if older == nil && time.Since(newer.CreationTimestamp.Time) > newFor { // it came before the watch
		now.at = time.Time{}
	}
	all := h.steps[newer.UID]
	if n := len(all); n > 0 {
		last := all[n-1]
		if last.phase == now.phase && last.reason == now.reason && last.member == now.member {
			return
		}
		if n >= maxSteps {
			all = append(all[:maxSteps/2], all[maxSteps/2+1:]...)
		}
	}
	h.steps[newer.UID] = append(all, now)
}

// Of is [Of] with the changes of phase that the watch showed, besides those in shown.
func (h *History) Of(o *agents.Sandbox, shown []Moment) []Moment {
	return Of(o, h.since, append(h.moments(o), shown...))
}

func (h *History) moments(o *agents.Sandbox) (all []Moment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.steps[o.UID] {
		if x.at.IsZero() || x.phase == sandbox.Pending && x.reason == "" {
			continue
		}
		if n := len(all); n > 0 && all[n-1].What == string(x.phase) && all[n-1].Detail == x.reason {
			continue // it was claimed, which is a moment of its own
		}
		all = append(all, Moment{At: x.at, What: string(x.phase), Detail: x.reason, Source: FromWatch, Bad: x.phase == sandbox.Dead})
	}
	return all
}

// WaitReason is why a sandbox is not ready; empty for one that is ready or paused, and where the object has no reason.
func WaitReason(o *agents.Sandbox) string {
	c := meta.FindStatusCondition(o.Status.Conditions, agents.ConditionReady)
	if c == nil || c.Status == "True" || c.Reason == agents.ReasonSandboxSuspended {
		return ""
	}
	return c.Message
}
