package sandbox

import (
	"cmp"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// Phase is the phase of a sandbox's lifecycle.
type Phase string

// Phases.
const (
	Pending  Phase = "Pending"  // accepted, nothing done yet
	Starting Phase = "Starting" // the node is creating it
	Running  Phase = "Running"  // its agent answers
	Pausing  Phase = "Pausing"  // a pause is requested
	Paused   Phase = "Paused"   // no process runs
	Resuming Phase = "Resuming" // a resume is requested
	Stopping Phase = "Stopping" // being removed
	Dead     Phase = "Dead"     // ended, failed or expired for good
)

// PhaseOf derives the phase from the object alone.
func PhaseOf(s *agents.Sandbox) Phase {
	switch {
	case s.DeletionTimestamp != nil:
		return Stopping
	case finished(s) || expired(s):
		return Dead
	}
	toSuspend, suspended := s.Spec.OperatingMode == agents.ModeSuspended, Suspended(s)
	switch {
	case suspended && (toSuspend || resumeFailed(s)):
		return Paused
	case suspended:
		return Resuming
	case toSuspend && Started(s):
		return Pausing
	case Ready(s), EntrypointFailed(s), sidecarFailed(s):
		return Running
	case Started(s) || (s.Status.Barchan != nil && s.Status.Barchan.Phase == string(Starting)):
		return Starting
	default:
		return Pending
	}
}

// Ready reports whether the sandbox's agent answered the controller's last check.
func Ready(s *agents.Sandbox) bool {
	return meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionReady)
}

// EntrypointFailed reports whether the sandbox is not ready because its entrypoint has failed and is
// not restarted. Its agent answers, and commands can be run in it.
func EntrypointFailed(s *agents.Sandbox) bool {
	_, failed := unreadyFor(s, agents.ReasonPodFailed)
	return failed && !finished(s)
}

// sidecarFailed reports whether the sandbox is not ready because the program of another container than the first has failed.
func sidecarFailed(s *agents.Sandbox) bool {
	_, failed := unreadyFor(s, ReasonContainers)
	return failed && !finished(s)
}

// Suspended reports whether the sandbox is paused.
func Suspended(s *agents.Sandbox) bool {
	return meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionSuspended)
}

// Started reports whether the sandbox has an address, which it gets with its first start.
func Started(s *agents.Sandbox) bool { return len(s.Status.PodIPs) > 0 }

// HasRun reports whether the sandbox has been started before, whatever its phase now.
func HasRun(s *agents.Sandbox) bool {
	return Started(s) || (s.Status.Barchan != nil && s.Status.Barchan.StartedAt != nil)
}

// DeadForGood reports whether the sandbox has ended and will never run again. It is the one
// predicate by which routes are deleted and containers collected.
func DeadForGood(s *agents.Sandbox) bool {
	p := PhaseOf(s)
	return p == Stopping || p == Dead
}

// Failure returns the reason and message for which a sandbox will not become ready without
// a change by its user; ok is false while it may still do so.
func Failure(s *agents.Sandbox) (reason, message string, ok bool) {
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionFinished)
	if c != nil && c.Status == "True" {
		return c.Reason, c.Message, true
	}
	return "", "", false
}

// EndOf returns why a sandbox that is dead for good has ended, as its object has it, or empty.
func EndOf(s *agents.Sandbox) string {
	if reason, message, ok := Failure(s); ok {
		return cmp.Or(message, reason)
	}
	end := s.Spec.ShutdownTime
	switch deleted := s.DeletionTimestamp; {
	case end != nil && (expired(s) || deleted != nil && !deleted.Before(end)):
		return "its timeout passed at " + end.UTC().Format(time.RFC3339)
	case deleted != nil:
		return "it was killed at " + deleted.UTC().Format(time.RFC3339)
	}
	return ""
}

func finished(s *agents.Sandbox) bool {
	return meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionFinished)
}

func resumeFailed(s *agents.Sandbox) bool {
	_, failed := ResumeFailure(s)
	return failed
}

func expired(s *agents.Sandbox) bool {
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	return c != nil && c.Reason == agents.ReasonSandboxExpired
}
