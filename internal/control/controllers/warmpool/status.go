package warmpool

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// memberCounts counts members by state.
type memberCounts struct {
	active, ready         int // of any revision, neither failed nor being deleted
	current, currentReady int
	starting, waiting     int    // current ones that are not ready
	failed, stale, ending int    // failed and stale ones overlap
	waitingFor            string // the reason of one that waits
	barred                int    // current ones
	bar                   string // the reason of one of them
}

func count(w poolTarget, members []member) (t memberCounts) {
	for _, m := range members {
		stale := m.revision != w.revision
		switch {
		case m.state == ending:
			t.ending++
			continue
		case m.state == failed:
			t.failed++
			continue
		case m.state == ready:
			t.ready++
		case m.state == waiting && !stale:
			t.waiting++
			t.waitingFor = m.note
		case m.state == startRefused && !stale:
			t.barred++
			t.bar = m.note
		case m.state == starting && !stale:
			t.starting++
		}
		t.active++
		if stale {
			t.stale++
			continue
		}
		t.current++
		if m.state == ready {
			t.currentReady++
		}
	}
	return t
}

// statusOf returns a pool's status after a pass.
func statusOf(s *reconcileState) *extensions.SandboxWarmPoolStatus {
	t := count(s.target, s.members)
	status := s.pool.Status.DeepCopy()
	status.Replicas, status.ReadyReplicas = int32(t.active), int32(t.ready) //nolint:gosec // at most thousands
	status.Selector = agents.LabelWarmPoolSandbox + "=" + string(s.pool.UID)
	status.ObservedGeneration = s.pool.Generation
	status.CurrentRevision = s.target.revision
	status.Barchan = &extensions.WarmPoolBarchanStatus{
		DesiredReplicas: int32(s.target.desired), CurrentReplicas: int32(t.current), //nolint:gosec // at most thousands
		CurrentReadyReplicas: int32(t.currentReady), ClaimedReplicas: int32(s.usage.claimed), //nolint:gosec // likewise
	}
	if !s.usage.last.IsZero() {
		at := metav1.NewTime(s.usage.last.Truncate(time.Second))
		status.Barchan.LastClaimTime = &at
	}
	for _, c := range conditions(s, t) {
		c.ObservedGeneration = s.pool.Generation
		meta.SetStatusCondition(&status.Conditions, c)
	}
	return status
}

// conditions returns the conditions of the status.
func conditions(s *reconcileState, t memberCounts) []metav1.Condition {
	text := statusMessage(s, t)
	reason, moves := movement(s, t)
	isReady := metav1.Condition{Type: extensions.PoolReady, Status: metav1.ConditionFalse, Reason: reason, Message: text}
	progress := metav1.Condition{Type: extensions.PoolProgressing, Status: metav1.ConditionFalse, Reason: reason, Message: text}
	if moves {
		progress.Status = metav1.ConditionTrue
	}
	if s.problem.reason == "" && t.currentReady >= s.target.desired {
		isReady.Status, isReady.Reason = metav1.ConditionTrue, rest(s)
	}
	return []metav1.Condition{isReady, progress}
}

// rest is the reason of a pool in its desired state.
func rest(s *reconcileState) string {
	if s.target.desired == 0 {
		return extensions.ReasonPoolIdle
	}
	return extensions.ReasonPoolFull
}

// movement is the reason of a pool's progress, and whether it continues without a change of its spec.
func movement(s *reconcileState, t memberCounts) (reason string, moves bool) {
	if reason = blocked(s, t); reason != "" {
		return reason, false
	}
	if s.target.warming && t.current < s.target.desired {
		return extensions.ReasonPoolWarmingUp, true
	}
	toMake := s.todo.create > s.made
	busy := t.starting > 0 || t.ending > 0 || toMake
	switch {
	case t.stale > 0:
		return extensions.ReasonPoolRollingOut, s.target.recreate || busy // else claims cause it
	case t.currentReady < s.target.desired:
		return filling(s), busy || t.waiting == 0
	case t.ending > 0 || t.active > s.target.desired:
		return extensions.ReasonPoolShrinking, true
	default:
		return rest(s), false
	}
}

// blocked is why a pool makes no progress; else empty.
func blocked(s *reconcileState, t memberCounts) string {
	switch {
	case s.problem.reason != "":
		return s.problem.reason
	case s.warm.failed != "" && t.currentReady < s.target.desired:
		return extensions.ReasonWarmUpFailed
	case t.barred > 0 && t.currentReady < s.target.desired:
		return extensions.ReasonMembersFailing
	case s.backoff.failures == 0 || t.currentReady >= s.target.desired:
		return ""
	case s.backoff.refused != "" && t.current < s.target.desired:
		return extensions.ReasonTemplateInvalid
	default:
		return extensions.ReasonMembersFailing
	}
}

// filling distinguishes the end of a rollout from a pool's first members.
func filling(s *reconcileState) string {
	c := meta.FindStatusCondition(s.pool.Status.Conditions, extensions.PoolProgressing)
	changed := s.pool.Status.CurrentRevision != "" && s.pool.Status.CurrentRevision != s.target.revision
	if changed || (c != nil && c.Reason == extensions.ReasonPoolRollingOut) {
		return extensions.ReasonPoolRollingOut
	}
	return extensions.ReasonPoolFilling
}

// statusMessage is the message of the conditions.
func statusMessage(s *reconcileState, t memberCounts) string {
	if s.problem.reason != "" {
		if t.active == 0 {
			return s.problem.text
		}
		return fmt.Sprintf("%s; %d %s kept, which no claim gets", s.problem.text, t.active, plural(t.active, "member is", "members are"))
	}
	parts := []string{"no members are wanted now"}
	if s.target.desired > 0 {
		parts[0] = fmt.Sprintf("%d of %d %s of the current revision %s ready",
			t.currentReady, s.target.desired, plural(s.target.desired, "member", "members"), plural(t.currentReady, "is", "are"))
	}
	add := func(n int, format string, args ...any) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s ", n, plural(n, "is", "are"))+fmt.Sprintf(format, args...))
		}
	}
	add(t.starting, "starting")
	add(t.waiting, "waiting for room on a node (%s)", cmp.Or(t.waitingFor, "no reason given"))
	add(t.barred, "not allowed to start, and kept (%s)", t.bar)
	if s.target.recreate {
		add(t.stale, "of an older revision")
	} else {
		add(t.stale, "of an older revision, to be replaced as claims come")
	}
	add(t.ending, "being removed")
	if text := s.warm.message(s.target.warming && t.current < s.target.desired); text != "" {
		parts = append(parts, text)
	}
	if t.failed > 0 {
		parts = append(parts, fmt.Sprintf("%d failed", t.failed))
	}
	if s.backoff.failures > 0 {
		parts = append(parts, trial(&s.backoff))
	}
	return strings.Join(parts, "; ")
}

// trial is why members fail and when the next is tried.
func trial(t *failureBackoff) string {
	if t.refused != "" {
		return fmt.Sprintf("the API server refuses members: %s; the next try is at %s", t.refused, clock(t.retryAt))
	}
	return fmt.Sprintf("the last failure was: %s; the next try is at %s", cmp.Or(t.cause, "unknown"), clock(t.retryAt))
}

func clock(t time.Time) string { return t.UTC().Format("15:04:05 UTC") }

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// numbersAlone reports whether nothing but numbers and messages changed. The last claim is no mere number to a pool that is sized by it.
func numbersAlone(p *extensions.SandboxWarmPool, now *extensions.SandboxWarmPoolStatus) bool {
	was := &p.Status
	if was.Barchan == nil || was.Barchan.DesiredReplicas != now.Barchan.DesiredReplicas || was.CurrentRevision != now.CurrentRevision || was.ObservedGeneration != now.ObservedGeneration {
		return false
	}
	if p.Spec.Barchan != nil && p.Spec.Barchan.Autoscale != nil && !was.Barchan.LastClaimTime.Equal(now.Barchan.LastClaimTime) {
		return false
	}
	return slices.EqualFunc(was.Conditions, now.Conditions, func(a, b metav1.Condition) bool {
		return a.Type == b.Type && a.Status == b.Status && a.Reason == b.Reason
	})
}

// writeStatus writes a changed status over the version of this pass, and records its events. Numbers alone wait for statusInterval, as
// they change with each claim.
func (r *reconciler) writeStatus(ctx context.Context, s *reconcileState) error {
	status := statusOf(s)
	if apiequality.Semantic.DeepEqual(&s.pool.Status, status) {
		return nil
	}
	if at := s.written.Add(statusInterval); s.now.Before(at) && numbersAlone(s.pool, status) {
		s.writeAt = at
		return nil
	}
	before := s.pool.Status
	s.pool.Status = *status
	if err := r.Client.Status().Update(ctx, s.pool); err != nil {
		return fmt.Errorf("write status of warm pool %s/%s: %w", s.pool.Namespace, s.pool.Name, err)
	}
	s.written = s.now
	for _, n := range eventsOf(&before, status) {
		r.record(s.pool, n)
	}
	return nil
}

// poolEvent is an Event about a change of the status.
type poolEvent struct {
	warning              bool
	reason, action, note string
}

// eventsOf returns the events of a change of the status.
func eventsOf(before, after *extensions.SandboxWarmPoolStatus) (all []poolEvent) {
	was, is := meta.FindStatusCondition(before.Conditions, extensions.PoolReady), meta.FindStatusCondition(after.Conditions, extensions.PoolReady)
	if before.Barchan != nil && before.Barchan.DesiredReplicas != after.Barchan.DesiredReplicas {
		note := fmt.Sprintf("wants %d members instead of %d", after.Barchan.DesiredReplicas, before.Barchan.DesiredReplicas)
		all = append(all, poolEvent{reason: "Scaled", action: "Scale", note: note})
	}
	if was == nil {
		was = &metav1.Condition{}
	}
	switch {
	case is.Reason == was.Reason:
	case is.Status == metav1.ConditionTrue && was.Reason == extensions.ReasonPoolRollingOut:
		all = append(all, poolEvent{reason: "RolledOut", action: "RollOut", note: "all members are of revision " + after.CurrentRevision})
	case slices.Contains(badReasons, is.Reason):
		all = append(all, poolEvent{warning: true, reason: is.Reason, action: "Fill", note: is.Message})
	}
	return all
}

// badReasons warrant a warning.
var badReasons = []string{
	extensions.ReasonMembersFailing, extensions.ReasonWarmUpFailed, extensions.ReasonTemplateInvalid, extensions.ReasonTemplateNotFound, extensions.ReasonTemplatePrivate,
}
