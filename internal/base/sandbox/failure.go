package sandbox

import (
	"k8s.io/apimachinery/pkg/api/meta"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

const (
	// ReasonResumeFailed is the reason of condition Ready of a sandbox that could not be resumed. It
	// stays paused, without loss.
	ReasonResumeFailed = "ResumeFailed"
	// ReasonSuspendFailed is the reason of condition Suspended of a sandbox that could not be paused.
	// It keeps running.
	ReasonSuspendFailed = "SuspendFailed"
)

// ResumeFailure returns why a sandbox could not be resumed for its current spec. It stays paused until
// a retry succeeds or its spec changes; clients should not wait for it. ok is false while there is no
// failure.
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

// SuspendFailure returns why a sandbox could not be paused for its current spec. It runs, and the
// pause is retried. ok is false while there is no failure.
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
