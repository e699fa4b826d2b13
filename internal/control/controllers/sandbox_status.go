package controllers

import (
	"cmp"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// startingStatus returns the status before the node acts.
func startingStatus(s *agents.Sandbox) *agents.SandboxStatus {
	return waitingStatus(s, "the node starts the sandbox")
}

// waitingStatus returns the status of a sandbox that has not started, with the reason.
func waitingStatus(s *agents.Sandbox, what string) *agents.SandboxStatus {
	status := s.Status.DeepCopy()
	status.Selector = agents.LabelSandboxNameHash + "=" + sandbox.NameHash(s.Name)
	status.Barchan = &agents.BarchanStatus{ID: string(sandbox.IDOf(s.UID)), Phase: string(sandbox.Starting)}
	set := conditionSetter(s, status)
	set(agents.ConditionSuspended, metav1.ConditionFalse, agents.ReasonNotSuspended, notSuspended)
	set(agents.ConditionReady, metav1.ConditionFalse, agents.ReasonDependenciesNotReady, what)
	return status
}

// What upstream says in these conditions.
const (
	notSuspended = "Sandbox is not suspended"
	isSuspended  = "Sandbox is suspended"
	isSuspending = "Sandbox is suspending"
)

// reasonScheduled is that of the condition PodScheduled.
const reasonScheduled = "PodScheduled"

// statusOf returns the status for the observed state.
func statusOf(s *agents.Sandbox, seen sandbox.Observed) *agents.SandboxStatus {
	status := s.Status.DeepCopy()
	if status.Barchan == nil {
		status = startingStatus(s)
	}
	switch {
	case seen.State == sandbox.ContainerPending: // who has its address may not be its agent
		status.PodIPs, status.NodeName = nil, cmp.Or(seen.Node, status.NodeName)
	case seen.Address.IsValid():
		status.PodIPs, status.NodeName = []string{seen.Address.String()}, seen.Node
		status.Barchan.Runtime, status.Barchan.Image = seen.Runtime, seen.Image
	case seen.State == sandbox.ContainerPaused, seen.State == sandbox.ContainerAbsent && s.Spec.OperatingMode == agents.ModeSuspended:
		status.PodIPs = nil // a suspended sandbox may have released its address
	}
	status.Service, status.ServiceFQDN = seen.Service, seen.ServiceFQDN
	if !seen.StartedAt.IsZero() {
		at := metav1.NewTime(seen.StartedAt.Truncate(1e9))
		status.Barchan.StartedAt = &at
	}
	status.Barchan.ExitCode, status.Barchan.Memory, status.Barchan.MemorySize = seen.EntrypointExit, seen.Memory, nil
	if seen.MemorySize > 0 {
		status.Barchan.MemorySize = resource.NewQuantity(seen.MemorySize, resource.BinarySI)
	}
	if seen.Sidecars != nil { // else what is known of them stays: it is paused, or has one container
		status.Barchan.Containers = *seen.Sidecars
	}
	if seen.Operations != nil { // those of an earlier process stay
		all := sandbox.Operations(status.Barchan.Operations)
		for _, op := range *seen.Operations {
			all = all.With(op)
		}
		status.Barchan.Operations = all
	}
	setConditions(s, status, seen)
	after := *s
	after.Status = *status
	status.Barchan.Phase = string(sandbox.PhaseOf(&after))
	return status
}

func setConditions(s *agents.Sandbox, status *agents.SandboxStatus, seen sandbox.Observed) {
	set := conditionSetter(s, status)
	suspended := s.Spec.OperatingMode == agents.ModeSuspended
	switch seen.State {
	case sandbox.ContainerRunning:
		set(agents.ConditionPodScheduled, metav1.ConditionTrue, reasonScheduled, "")
		setReady(set, seen)
		set(agents.ConditionSuspended, metav1.ConditionFalse, agents.ReasonNotSuspended, notSuspended)
	case sandbox.ContainerPending:
		mirrorScheduled(set, status, seen.PodScheduled)
		if suspended {
			set(agents.ConditionReady, metav1.ConditionFalse, agents.ReasonSandboxSuspended, isSuspending)
			set(agents.ConditionSuspended, metav1.ConditionFalse, cmp.Or(seen.Reason, agents.ReasonPodTerminating), seen.Message)
			return
		}
		set(agents.ConditionReady, metav1.ConditionFalse, cmp.Or(seen.Reason, agents.ReasonDependenciesNotReady), seen.Message)
		set(agents.ConditionSuspended, metav1.ConditionFalse, agents.ReasonNotSuspended, notSuspended)
	case sandbox.ContainerPaused:
		if _, failed := sandbox.ResumeFailure(s); !failed {
			set(agents.ConditionReady, metav1.ConditionFalse, agents.ReasonSandboxSuspended, isSuspended)
		}
		set(agents.ConditionSuspended, metav1.ConditionTrue, agents.ReasonPodTerminated, cmp.Or(seen.Message, "memory and files are kept"))
	case sandbox.ContainerAbsent:
		if suspended {
			set(agents.ConditionReady, metav1.ConditionFalse, agents.ReasonSandboxSuspended, isSuspended)
			set(agents.ConditionSuspended, metav1.ConditionTrue, agents.ReasonPodTerminated, cmp.Or(seen.Message, keptOfAbsent(s)))
			meta.RemoveStatusCondition(&status.Conditions, agents.ConditionPodScheduled) // of a Pod that is gone
		}
	case sandbox.ContainerExited:
		reason := agents.ReasonPodFailed
		if seen.EntrypointExit != nil && *seen.EntrypointExit == 0 {
			reason = agents.ReasonPodSucceeded
		}
		set(agents.ConditionReady, metav1.ConditionFalse, reason, seen.Message)
		set(agents.ConditionFinished, metav1.ConditionTrue, reason, seen.Message)
	}
}

// mirrorScheduled mirrors the condition PodScheduled of a Pod that does not run. True only replaces False, because a Pod that is
// scheduled at once needs no status of its own for that.
func mirrorScheduled(set func(kind string, value metav1.ConditionStatus, reason, message string), status *agents.SandboxStatus, c *corev1.PodCondition) {
	switch {
	case c == nil:
	case c.Status == corev1.ConditionFalse:
		set(agents.ConditionPodScheduled, metav1.ConditionFalse, cmp.Or(c.Reason, corev1.PodReasonUnschedulable), c.Message)
	case c.Status == corev1.ConditionTrue && meta.IsStatusConditionFalse(status.Conditions, agents.ConditionPodScheduled):
		set(agents.ConditionPodScheduled, metav1.ConditionTrue, reasonScheduled, "")
	}
}

// setReady sets the Ready condition of a running sandbox: true if its probes succeed and its entrypoint
// has not failed.
func setReady(set func(kind string, value metav1.ConditionStatus, reason, message string), seen sandbox.Observed) {
	failure := ""
	if seen.EntrypointExit != nil && *seen.EntrypointExit != 0 {
		failure = fmt.Sprintf("its entrypoint ended with code %d, and is not started again; commands can still be run", *seen.EntrypointExit)
	}
	unready, failed := seen.Sidecars.Unready()
	switch {
	case failed && seen.Probed && failure == "":
		set(agents.ConditionReady, metav1.ConditionFalse, sandbox.ReasonContainers, unready)
	case seen.Probed && unready != "" && failure == "":
		set(agents.ConditionReady, metav1.ConditionFalse, agents.ReasonDependenciesNotReady, unready)
	case !seen.Probed:
		set(agents.ConditionReady, metav1.ConditionFalse, agents.ReasonDependenciesNotReady, strings.TrimPrefix(failure+"; "+seen.Message, "; "))
	case failure != "":
		set(agents.ConditionReady, metav1.ConditionFalse, agents.ReasonPodFailed, failure)
	default:
		set(agents.ConditionReady, metav1.ConditionTrue, agents.ReasonDependenciesReady, seen.Message)
	}
}

// keptOfAbsent describes the kept state of a suspended sandbox without data on the node.
func keptOfAbsent(s *agents.Sandbox) string {
	if sandbox.HasRun(s) && suspendMode(s) == agents.SuspendDelete {
		return "its volumes are kept"
	}
	return "it has not been started"
}

// setSuspendFailed records a failed suspend. Ready is unchanged.
func setSuspendFailed(s *agents.Sandbox, status *agents.SandboxStatus, text string) {
	conditionSetter(s, status)(agents.ConditionSuspended, metav1.ConditionFalse, sandbox.ReasonSuspendFailed, text)
	after := *s
	after.Status = *status
	status.Barchan.Phase = string(sandbox.PhaseOf(&after))
}

// setFailure records an error; a final one ends the sandbox.
func setFailure(s *agents.Sandbox, status *agents.SandboxStatus, reason, text string, final bool) {
	set := conditionSetter(s, status)
	set(agents.ConditionReady, metav1.ConditionFalse, reason, text)
	if final {
		set(agents.ConditionFinished, metav1.ConditionTrue, agents.ReasonPodFailed, text)
	}
	after := *s
	after.Status = *status
	status.Barchan.Phase = string(sandbox.PhaseOf(&after))
}

// expiredStatus returns the status of an expired, retained sandbox, as upstream sets it. It keeps the node,
// which has yet to remove the sandbox, the conditions of an earlier end, and Suspended. why is added to the message.
func expiredStatus(s *agents.Sandbox, why string) *agents.SandboxStatus {
	status := &agents.SandboxStatus{NodeName: s.Status.NodeName, Barchan: &agents.BarchanStatus{ID: string(sandbox.IDOf(s.UID)), Phase: string(sandbox.Dead)}}
	for _, kind := range []string{agents.ConditionReady, agents.ConditionSuspended, agents.ConditionFinished} {
		if old := meta.FindStatusCondition(s.Status.Conditions, kind); old != nil {
			status.Conditions = append(status.Conditions, *old)
		}
	}
	conditionSetter(s, status)(agents.ConditionReady, metav1.ConditionFalse, agents.ReasonSandboxExpired, "Sandbox has expired"+why)
	return status
}

func conditionSetter(s *agents.Sandbox, status *agents.SandboxStatus) func(kind string, value metav1.ConditionStatus, reason, message string) {
	return func(kind string, value metav1.ConditionStatus, reason, message string) {
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{
			Type: kind, Status: value, Reason: reason, Message: message, ObservedGeneration: s.Generation,
		})
	}
}
