package controllers

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// sandboxEvent is a Kubernetes event.
type sandboxEvent struct{ kind, reason, action, note string }

// recordEvents records the changes between two statuses of a sandbox.
func (r *sandboxReconciler) recordEvents(s *agents.Sandbox, before, after *agents.SandboxStatus) {
	if r.Events == nil {
		return
	}
	for _, n := range (statusChange{before, after, r.Node == ""}).events() {
		r.Events.Eventf(s, nil, n.kind, n.reason, n.action, "%s", n.note)
	}
}

// statusChange is a pair of successive statuses of a sandbox. pod is whether it runs in a Pod, of which kubelet records the start.
type statusChange struct {
	before, after *agents.SandboxStatus
	pod           bool
}

func (p statusChange) events() (all []sandboxEvent) {
	for _, detect := range []func() (sandboxEvent, bool){p.started, p.suspended, p.resumed, p.finished, p.unhealthy, p.entrypointEnded} {
		if n, ok := detect(); ok {
			all = append(all, n)
		}
	}
	return all
}

// became returns the condition if it has changed to the value.
func (p statusChange) became(kind string, value metav1.ConditionStatus) *metav1.Condition {
	now, was := meta.FindStatusCondition(p.after.Conditions, kind), meta.FindStatusCondition(p.before.Conditions, kind)
	if now == nil || now.Status != value || (was != nil && was.Status == value) {
		return nil
	}
	return now
}

func (p statusChange) wasSuspended() bool {
	return meta.IsStatusConditionTrue(p.before.Conditions, agents.ConditionSuspended)
}

func (p statusChange) started() (sandboxEvent, bool) {
	if p.pod || len(p.before.PodIPs) > 0 || len(p.after.PodIPs) == 0 {
		return sandboxEvent{}, false
	}
	note := fmt.Sprintf("runs on node %s with address %s by %s", p.after.NodeName, strings.Join(p.after.PodIPs, ", "), p.after.Barchan.Runtime)
	return sandboxEvent{corev1.EventTypeNormal, "Started", "Start", note}, true
}

func (p statusChange) suspended() (sandboxEvent, bool) {
	c := p.became(agents.ConditionSuspended, metav1.ConditionTrue)
	if c == nil {
		return sandboxEvent{}, false
	}
	return sandboxEvent{corev1.EventTypeNormal, "Suspended", "Suspend", "paused; " + c.Message}, true
}

func (p statusChange) resumed() (sandboxEvent, bool) {
	resumed := p.wasSuspended() && p.became(agents.ConditionSuspended, metav1.ConditionFalse) != nil
	return sandboxEvent{corev1.EventTypeNormal, "Resumed", "Resume", "runs again"}, resumed
}

func (p statusChange) finished() (sandboxEvent, bool) {
	c := p.became(agents.ConditionFinished, metav1.ConditionTrue)
	if c == nil {
		return sandboxEvent{}, false
	}
	kind := corev1.EventTypeWarning
	if c.Reason == agents.ReasonPodSucceeded {
		kind = corev1.EventTypeNormal
	}
	return sandboxEvent{kind, "Finished", "Run", c.Message}, true
}

func (p statusChange) unhealthy() (sandboxEvent, bool) {
	c := p.became(agents.ConditionReady, metav1.ConditionFalse)
	if _, finished := p.finished(); finished || c == nil || c.Reason != agents.ReasonDependenciesNotReady || c.Message == "" {
		return sandboxEvent{}, false
	}
	first := meta.FindStatusCondition(p.before.Conditions, agents.ConditionReady) == nil
	return sandboxEvent{corev1.EventTypeWarning, "Unhealthy", "Probe", c.Message}, !first
}

func (p statusChange) entrypointEnded() (sandboxEvent, bool) {
	code := exitOf(p.after)
	if _, finished := p.finished(); finished || code == nil || exitOf(p.before) != nil {
		return sandboxEvent{}, false
	}
	kind := corev1.EventTypeNormal
	if *code != 0 {
		kind = corev1.EventTypeWarning
	}
	note := fmt.Sprintf("its entrypoint ended with code %d; the sandbox lives on", *code)
	return sandboxEvent{kind, "EntrypointEnded", "Run", note}, true
}

func exitOf(s *agents.SandboxStatus) *int32 {
	if s.Barchan == nil {
		return nil
	}
	return s.Barchan.ExitCode
}
