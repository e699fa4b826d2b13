package controllers

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// sandboxEvent is what people should see of a change beside the object.
type sandboxEvent struct{ kind, reason, action, note string }

// tell records what changed between two statuses of a sandbox.
func (r *sandboxReconciler) tell(s *agents.Sandbox, before, after *agents.SandboxStatus) {
	if r.events == nil {
		return
	}
	for _, n := range (step{before, after}).news() {
		r.events.Eventf(s, nil, n.kind, n.reason, n.action, "%s", n.note)
	}
}

// step is what lies between two statuses of a sandbox.
type step struct{ before, after *agents.SandboxStatus }

func (p step) news() (all []sandboxEvent) {
	for _, look := range []func() (sandboxEvent, bool){p.started, p.slept, p.woke, p.finished, p.unhealthy, p.ready, p.entrypointEnded} {
		if n, ok := look(); ok {
			all = append(all, n)
		}
	}
	return all
}

// became returns a condition that has taken the value in this step.
func (p step) became(kind string, value metav1.ConditionStatus) *metav1.Condition {
	now, was := meta.FindStatusCondition(p.after.Conditions, kind), meta.FindStatusCondition(p.before.Conditions, kind)
	if now == nil || now.Status != value || (was != nil && was.Status == value) {
		return nil
	}
	return now
}

func (p step) wasAsleep() bool {
	return meta.IsStatusConditionTrue(p.before.Conditions, agents.ConditionSuspended)
}

func (p step) started() (sandboxEvent, bool) {
	if len(p.before.PodIPs) > 0 || len(p.after.PodIPs) == 0 {
		return sandboxEvent{}, false
	}
	note := fmt.Sprintf("runs on node %s with address %s by %s", p.after.NodeName, strings.Join(p.after.PodIPs, ", "), p.after.Barchan.Runtime)
	return sandboxEvent{corev1.EventTypeNormal, "Started", "Start", note}, true
}

func (p step) slept() (sandboxEvent, bool) {
	c := p.became(agents.ConditionSuspended, metav1.ConditionTrue)
	if c == nil {
		return sandboxEvent{}, false
	}
	return sandboxEvent{corev1.EventTypeNormal, "Suspended", "Suspend", "sleeps; " + c.Message}, true
}

func (p step) woke() (sandboxEvent, bool) {
	woke := p.wasAsleep() && p.became(agents.ConditionSuspended, metav1.ConditionFalse) != nil
	return sandboxEvent{corev1.EventTypeNormal, "Resumed", "Resume", "runs again"}, woke
}

func (p step) finished() (sandboxEvent, bool) {
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

func (p step) unhealthy() (sandboxEvent, bool) {
	c := p.became(agents.ConditionReady, metav1.ConditionFalse)
	if _, finished := p.finished(); finished || c == nil || c.Reason != agents.ReasonDependenciesNotReady || c.Message == "" {
		return sandboxEvent{}, false
	}
	first := meta.FindStatusCondition(p.before.Conditions, agents.ConditionReady) == nil
	return sandboxEvent{corev1.EventTypeWarning, "Unhealthy", "Probe", c.Message}, !first
}

func (p step) ready() (sandboxEvent, bool) {
	ready := p.became(agents.ConditionReady, metav1.ConditionTrue) != nil && !p.wasAsleep()
	return sandboxEvent{corev1.EventTypeNormal, "Ready", "Probe", "its agent answers and its probes succeed"}, ready
}

func (p step) entrypointEnded() (sandboxEvent, bool) {
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
