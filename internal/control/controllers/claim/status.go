package claim

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// maxMessage is the maximum length of a condition message.
const maxMessage = 32 << 10

// setter returns a function that sets conditions of a status.
func setter(c *extensions.SandboxClaim, status *extensions.SandboxClaimStatus) func(metav1.Condition) {
	return func(with metav1.Condition) {
		with.ObservedGeneration = c.Generation
		with.Message = strings.ToValidUTF8(with.Message[:min(len(with.Message), maxMessage)], "")
		meta.SetStatusCondition(&status.Conditions, with)
	}
}

func readyOf(status *extensions.SandboxClaimStatus) *metav1.Condition {
	return meta.FindStatusCondition(status.Conditions, agents.ConditionReady)
}

// waiting returns the status of a claim without a sandbox.
func waiting(c *extensions.SandboxClaim, reason, message string) *extensions.SandboxClaimStatus {
	status := c.Status.DeepCopy()
	setter(c, status)(metav1.Condition{Type: agents.ConditionReady, Status: metav1.ConditionFalse, Reason: reason, Message: message})
	return status
}

// mirrored returns the status of a claim with a sandbox.
func mirrored(c *extensions.SandboxClaim, s *agents.Sandbox) *extensions.SandboxClaimStatus {
	status := c.Status.DeepCopy()
	status.Sandbox = extensions.ClaimedSandbox{Name: s.Name, PodIPs: slices.Clone(s.Status.PodIPs)}
	set := setter(c, status)
	ready := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	switch {
	case s.DeletionTimestamp != nil:
		set(metav1.Condition{Type: agents.ConditionReady, Status: metav1.ConditionFalse, Reason: extensions.ReasonSandboxNotReady, Message: fmt.Sprintf("sandbox %s is being deleted", s.Name)})
	case ready == nil:
		set(metav1.Condition{Type: agents.ConditionReady, Status: metav1.ConditionFalse, Reason: extensions.ReasonSandboxNotReady, Message: fmt.Sprintf("nothing is known of sandbox %s yet", s.Name)})
	default:
		set(metav1.Condition{Type: agents.ConditionReady, Status: ready.Status, Reason: ready.Reason, Message: ready.Message})
	}
	if f := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionFinished); f != nil {
		set(metav1.Condition{Type: f.Type, Status: f.Status, Reason: f.Reason, Message: f.Message, LastTransitionTime: f.LastTransitionTime})
	}
	return status
}

// missing returns the status of a claim whose sandbox is deleted.
func missing(c *extensions.SandboxClaim) *extensions.SandboxClaimStatus {
	status := waiting(c, extensions.ReasonSandboxMissing, fmt.Sprintf("sandbox %s is gone; make a new claim to get another", c.Status.Sandbox.Name))
	status.Sandbox.PodIPs = nil
	return status
}

// hasExpired reports whether the status records the end of a claim, which is final.
func hasExpired(c *extensions.SandboxClaim) bool {
	ready := readyOf(&c.Status)
	return ready != nil && ready.Reason == extensions.ReasonClaimExpired
}

// endOf returns when and why a claim ends; false if nothing ends it.
func endOf(c *extensions.SandboxClaim) (at time.Time, why string, ends bool) {
	l := c.Spec.Lifecycle
	if l == nil || hasExpired(c) {
		return time.Time{}, "", false
	}
	if l.ShutdownTime != nil {
		at, ends = l.ShutdownTime.Time, true
		why = fmt.Sprintf("its spec.lifecycle.shutdownTime, %s, has passed", at.UTC().Format(time.RFC3339))
	}
	done := meta.FindStatusCondition(c.Status.Conditions, agents.ConditionFinished)
	if l.TTLSecondsAfterFinished == nil || done == nil || done.Status != metav1.ConditionTrue {
		return at, why, ends
	}
	if ttl := done.LastTransitionTime.Add(time.Duration(*l.TTLSecondsAfterFinished) * time.Second); !ends || ttl.Before(at) {
		return ttl, fmt.Sprintf("its spec.lifecycle.ttlSecondsAfterFinished, %d s, has passed since its sandbox finished", *l.TTLSecondsAfterFinished), true
	}
	return at, why, ends
}

func isOver(c *extensions.SandboxClaim) bool {
	at, _, ends := endOf(c)
	return ends && !time.Now().Before(at)
}

// expire deletes the sandbox of a claim, and the claim too if its policy is Delete.
func (r *reconciler) expire(ctx context.Context, w *work) error {
	_, why, _ := endOf(w.claim)
	policy, propagation := w.claim.Spec.Lifecycle.ShutdownPolicy, metav1.DeletePropagationBackground
	switch policy {
	case extensions.ClaimDeleteForeground:
		propagation = metav1.DeletePropagationForeground
	case extensions.ClaimDelete:
	case extensions.ClaimRetain, "":
		return r.retain(ctx, w, why)
	}
	same := client.Preconditions{UID: &w.claim.UID, ResourceVersion: &w.claim.ResourceVersion}
	if err := r.Client.Delete(ctx, w.claim, same, client.PropagationPolicy(propagation)); err != nil {
		return fmt.Errorf("delete the expired claim: %w", err)
	}
	r.Log.InfoContext(ctx, "expired claim deleted", telemetry.Namespace, w.req.Namespace, telemetry.Name, w.req.Name, telemetry.Reason, why)
	r.recordEvent(w, corev1.EventTypeNormal, extensions.ReasonClaimExpired, why)
	return nil
}

// retain records the end of an expired claim, conditional on the version read, so that a concurrent extension
// wins. It deletes the sandbox afterwards.
func (r *reconciler) retain(ctx context.Context, w *work, why string) error {
	status := waiting(w.claim, extensions.ReasonClaimExpired, why+"; make a new claim to get another sandbox")
	status.Sandbox = extensions.ClaimedSandbox{}
	if _, err := r.write(ctx, w, status); err != nil {
		return err
	}
	r.Log.InfoContext(ctx, "claim expired", telemetry.Namespace, w.req.Namespace, telemetry.Name, w.req.Name, telemetry.Reason, why)
	r.recordEvent(w, corev1.EventTypeNormal, extensions.ReasonClaimExpired, why)
	return r.removeOwned(ctx, w)
}

// removeOwned deletes the sandboxes of an ended claim. A sandbox that the cache does not show yet causes
// another reconcile by its event.
func (r *reconciler) removeOwned(ctx context.Context, w *work) error {
	owned, err := r.owned(ctx, w)
	if err != nil {
		return err
	}
	for i := range owned {
		if err := r.remove(ctx, owned[i]); err != nil {
			return err
		}
	}
	return nil
}

// write writes a changed status, conditional on the version read.
func (r *reconciler) write(ctx context.Context, w *work, status *extensions.SandboxClaimStatus) (changed bool, err error) {
	if apiequality.Semantic.DeepEqual(&w.claim.Status, status) {
		return false, nil
	}
	if err := w.annotated(); err != nil {
		return false, err
	}
	c := w.claim.DeepCopy()
	c.Status = *status
	if err := r.Client.Status().Update(ctx, c); err != nil {
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return false, err
		}
		return false, fmt.Errorf("write the claim's status: %w", err)
	}
	failpoint.Reach("claimobject/status")
	r.named.Assume(ctx, c)
	w.claim = c
	return true, nil
}
