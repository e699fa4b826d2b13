package sandbox

import (
	"k8s.io/apimachinery/pkg/api/meta"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

const (
	// ReasonResumeFailed is the reason of condition Ready of a sandbox that was asked to run and could not
	// be woken. It sleeps on, and nothing of it is lost.
	ReasonResumeFailed = "ResumeFailed"
	// ReasonSuspendFailed is the reason of condition Suspended of a sandbox that was asked to sleep and
	// could not. It runs on.
	ReasonSuspendFailed = "SuspendFailed"
)

// ResumeFailure returns why a sandbox that is wanted to run could not be woken, as its spec stands
// now. It sleeps until a later try succeeds, or its spec says something else; who waits for it to run
// need not. ok is false while nothing has failed.
func ResumeFailure(s *agents.Sandbox) (message string, ok bool) {
	if s.Spec.OperatingMode == agents.ModeSuspended || !Suspended(s) {
		return "", false
	}
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	if c == nil || c.Reason != ReasonResumeFailed || c.ObservedGeneration != s.Generation {
		return "", false
	}
	return c.Message, true
}

// SuspendFailure returns why a sandbox that is wanted to sleep could not be put to sleep, as its spec
// stands now. It runs, and further tries are made. ok is false while nothing has failed.
func SuspendFailure(s *agents.Sandbox) (message string, ok bool) {
	if s.Spec.OperatingMode != agents.ModeSuspended {
		return "", false
	}
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionSuspended)
	if c == nil || c.Reason != ReasonSuspendFailed || c.ObservedGeneration != s.Generation {
		return "", false
	}
	return c.Message, true
}
