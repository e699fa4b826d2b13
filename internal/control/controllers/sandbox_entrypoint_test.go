package controllers

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// A sandbox whose entrypoint has failed keeps running, is not ready, and reports it.
func TestFailedEntrypointIsNotReady(t *testing.T) {
	code := func(c int32) *int32 { return &c }
	for name, tt := range map[string]struct {
		exit    *int32
		probed  bool
		ready   bool
		reason  string
		message string
		phase   sandbox.Phase
	}{
		"runs":            {nil, true, true, agents.ReasonDependenciesReady, "", sandbox.Running},
		"done":            {code(0), true, true, agents.ReasonDependenciesReady, "", sandbox.Running},
		"failed":          {code(9), true, false, agents.ReasonPodFailed, "its entrypoint ended with code 9, and is not started again; commands can still be run", sandbox.Running},
		"probe fails":     {nil, false, false, agents.ReasonDependenciesNotReady, "refused", sandbox.Starting},
		"failed, probed":  {code(9), false, false, agents.ReasonDependenciesNotReady, "its entrypoint ended with code 9, and is not started again; commands can still be run; refused", sandbox.Starting},
		"done, probe too": {code(0), false, false, agents.ReasonDependenciesNotReady, "refused", sandbox.Starting},
	} {
		t.Run(name, func(t *testing.T) {
			w, s := ran(t)
			seen := w.machine.seen(refOf(s))
			seen.EntrypointExit, seen.Probed = tt.exit, tt.probed
			if !tt.probed {
				seen.Message = "refused"
			}
			before := s.Status
			s.Status = *statusOf(s, seen)
			c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
			if sandbox.Ready(s) != tt.ready || c.Reason != tt.reason || c.Message != tt.message {
				t.Errorf("Ready = %+v", c)
			}
			if sandbox.PhaseOf(s) != tt.phase || s.Status.Barchan.Phase != string(tt.phase) || sandbox.DeadForGood(s) {
				t.Errorf("phase %s, in its status %s", sandbox.PhaseOf(s), s.Status.Barchan.Phase)
			}
			if failed := tt.exit != nil && *tt.exit != 0; failed {
				if recorded := (statusChange{before: &before, after: &s.Status}).events(); recorded[len(recorded)-1].kind != corev1.EventTypeWarning || recorded[len(recorded)-1].reason != "EntrypointEnded" {
					t.Errorf("it is recorded as %v", recorded)
				}
			}
		})
	}
}
