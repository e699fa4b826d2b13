package sandbox

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

func TestFailuresOfSleepAndWake(t *testing.T) {
	const text = "memory: was written by another build"
	suspended := metav1.Condition{Type: agents.ConditionSuspended, Status: "True", Reason: agents.ReasonPodTerminated}
	for name, tt := range map[string]struct {
		mode       agents.OperatingMode
		generation int64 // of the object; what failed was seen at 2
		conditions []metav1.Condition
		resume     bool
		suspend    bool
	}{
		"resume failed":       {agents.ModeRunning, 2, []metav1.Condition{suspended, {Type: agents.ConditionReady, Status: "False", Reason: ReasonResumeFailed}}, true, false},
		"requested again":     {agents.ModeRunning, 3, []metav1.Condition{suspended, {Type: agents.ConditionReady, Status: "False", Reason: ReasonResumeFailed}}, false, false},
		"no longer requested": {agents.ModeSuspended, 2, []metav1.Condition{suspended, {Type: agents.ConditionReady, Status: "False", Reason: ReasonResumeFailed}}, false, false},
		"resumed after all":   {agents.ModeRunning, 2, []metav1.Condition{{Type: agents.ConditionReady, Status: "True", Reason: agents.ReasonDependenciesReady}}, false, false},
		"still tried":         {agents.ModeRunning, 2, []metav1.Condition{suspended, {Type: agents.ConditionReady, Status: "False", Reason: agents.ReasonReconcilerError}}, false, false},
		"suspend failed":      {agents.ModeSuspended, 2, []metav1.Condition{{Type: agents.ConditionSuspended, Status: "False", Reason: ReasonSuspendFailed}}, false, true},
		"may keep running":    {agents.ModeRunning, 2, []metav1.Condition{{Type: agents.ConditionSuspended, Status: "False", Reason: ReasonSuspendFailed}}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Generation: tt.generation}, Spec: agents.SandboxSpec{OperatingMode: tt.mode}}
			for _, c := range tt.conditions {
				c.Message, c.ObservedGeneration = text, 2
				s.Status.Conditions = append(s.Status.Conditions, c)
			}
			message, failed := ResumeFailure(s)
			if failed != tt.resume || (failed && message != text) {
				t.Errorf("ResumeFailure = %q, %v", message, failed)
			}
			message, failed = SuspendFailure(s)
			if failed != tt.suspend || (failed && message != text) {
				t.Errorf("SuspendFailure = %q, %v", message, failed)
			}
		})
	}
}
