// Package timing records how long the steps of an operation on a sandbox take, for its status.
package timing

import (
	"cmp"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// Steps has the times of an operation's steps. Those of containers besides the first are not recorded: they are part of the
// sandbox's step, and their Steps are nil. It is safe for concurrent use.
type Steps struct {
	began time.Time

	mu    sync.Mutex
	steps []agents.StepStatus // +checklocks:mu
}

// New starts an operation now.
func New() *Steps { return &Steps{began: time.Now()} }

// Began sets the start of an operation before its first step.
func (t *Steps) Began(at time.Time) { t.began = at }

// Record records a step that ends now.
func (t *Steps) Record(step string, began time.Time) {
	took := time.Since(began).Round(time.Millisecond)
	if t == nil || took == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.steps) < agents.MaxOperationSteps {
		t.steps = append(t.steps, agents.StepStatus{Name: step, After: max(0, began.Sub(t.began).Milliseconds()), Milliseconds: took.Milliseconds()})
	}
}

// Timed does something, and records it as a step if it succeeds.
func (t *Steps) Timed(step string, do func() error) error {
	began := time.Now()
	err := do()
	if err == nil {
		t.Record(step, began)
	}
	return err
}

// Status returns the operation as one that ends now.
func (t *Steps) Status(op agents.OperationType) agents.OperationStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	steps := slices.SortedStableFunc(slices.Values(t.steps), func(a, b agents.StepStatus) int { return cmp.Compare(a.After, b.After) })
	return agents.OperationStatus{
		Operation: op, StartedAt: metav1.NewMicroTime(t.began.Truncate(time.Microsecond)), // objects keep no more
		Milliseconds: time.Since(t.began).Round(time.Millisecond).Milliseconds(), Steps: steps,
	}
}
