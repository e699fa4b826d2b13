package timeline

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// sandboxOf is a sandbox that was created at a time, and is ready or waits for a reason.
func sandboxOf(created time.Time, reason string) *agents.Sandbox {
	o := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{UID: "a", CreationTimestamp: metav1.NewTime(created)}}
	ready := metav1.Condition{Type: agents.ConditionReady, Status: metav1.ConditionTrue}
	if reason != "" {
		ready.Status, ready.Message = metav1.ConditionFalse, reason
	}
	o.Status.Conditions = []metav1.Condition{ready}
	return o
}

func TestHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHistory()
		created := time.Now()
		waits, runs := sandboxOf(created, "image is pulled"), sandboxOf(created, "")
		h.Observe(nil, waits)
		time.Sleep(3 * time.Millisecond)
		h.Observe(waits, runs)
		h.Observe(runs, runs)
		got := h.moments(runs)
		if len(got) != 2 || got[0].Detail != "image is pulled" || got[1].At.Sub(got[0].At) != 3*time.Millisecond || got[1].Source != FromWatch {
			t.Errorf("moments = %+v, want the wait, and after 3 ms the end of it", got)
		}
		shown := Moment{At: created.Add(time.Millisecond), What: "Pulled"}
		if all := h.Of(runs, []Moment{shown}); !slices.ContainsFunc(all, func(m Moment) bool { return m.What == shown.What }) || len(all) < len(got)+1 {
			t.Errorf("the timeline lacks what it was given: %+v", all)
		}
		h.Observe(runs, nil)
		if got := h.moments(runs); got != nil {
			t.Errorf("the steps of a deleted one are kept: %+v", got)
		}
	})
}

func TestHistoryIsBounded(t *testing.T) {
	h := NewHistory()
	for range 1000 {
		h.Observe(sandboxOf(time.Now(), "waits"), sandboxOf(time.Now(), ""))
		h.Observe(sandboxOf(time.Now(), ""), sandboxOf(time.Now(), "waits"))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.steps["a"]); n != maxSteps {
		t.Errorf("%d steps are kept, want %d", n, maxSteps)
	}
}

// TestHistoryOfAnOldSandbox: the time of a state that the watch found is unknown.
func TestHistoryOfAnOldSandbox(t *testing.T) {
	h := NewHistory()
	old := sandboxOf(time.Now().Add(-time.Hour), "")
	h.Observe(nil, old)
	if got := h.moments(old); got != nil {
		t.Errorf("the state of an old one has a time: %+v", got)
	}
}
