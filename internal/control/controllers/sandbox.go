package controllers

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

type sandboxReconciler struct {
	SandboxConfig
	cache client.Reader
	// members limits the starts of unclaimed pool members that have never run.
	members *startLimiter
	refused *refusals
}

// Reconcile does one step for one sandbox.
func (r *sandboxReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	defer r.members.release(req.NamespacedName)
	s := &agents.Sandbox{}
	if err := r.cache.Get(ctx, req.NamespacedName, s); err != nil {
		if apierrors.IsNotFound(err) {
			r.Runner.ObjectDeleted(req.Namespace, req.Name)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if r.Assumed != nil {
		s = r.Assumed.Latest(s)
	}
	if r.Node != "" && s.Status.NodeName != "" && s.Status.NodeName != r.Node {
		r.Log.DebugContext(ctx, "sandbox of another node ignored", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Node, s.Status.NodeName)
		return reconcile.Result{}, nil
	}
	ctx = telemetry.Continue(ctx, r.Tracing, s)
	result, err := r.step(ctx, s)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		// A concurrent write; its event also causes a reconcile.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	return result, err
}

func (r *sandboxReconciler) step(ctx context.Context, s *agents.Sandbox) (reconcile.Result, error) {
	if s.DeletionTimestamp != nil {
		return reconcile.Result{}, r.clear(ctx, s)
	}
	if expired(s) { // the recorded end is final, even if shutdownTime has changed
		if err := r.clear(ctx, s); err != nil || s.Spec.ShutdownPolicy != agents.ShutdownDelete {
			return reconcile.Result{}, err
		}
	}
	if until, ends := timeLeft(s); ends && until <= 0 {
		return reconcile.Result{}, r.expire(ctx, s)
	}
	if sandbox.PhaseOf(s) == sandbox.Dead {
		return r.untilEnd(s), nil
	}
	if r.Node != "" && controllerutil.AddFinalizer(s, agents.NodeFinalizer) {
		// A sandbox without the finalizer must not start: its removal could not be awaited.
		if err := r.Client.Update(ctx, s); err != nil {
			return reconcile.Result{}, fmt.Errorf("add finalizer to sandbox %s/%s: %w", s.Namespace, s.Name, err)
		}
	}
	if waits, err := r.awaitsOrigin(ctx, s); err != nil && ctx.Err() == nil {
		return r.failed(ctx, s, sandbox.Observed{}, err)
	} else if waits || err != nil {
		return r.untilEnd(s), err
	}
	return r.apply(ctx, s)
}

// apply reconciles the container with the spec, unless the start limit defers it, and writes the status.
func (r *sandboxReconciler) apply(ctx context.Context, s *agents.Sandbox) (reconcile.Result, error) {
	if !r.mayStart(ctx, s) {
		return r.untilEnd(s), nil
	}
	if err := r.prepare(ctx, s); isFinal(err) {
		return r.failed(ctx, s, sandbox.Observed{}, err)
	} else if err != nil {
		return reconcile.Result{}, err
	}
	seen, tried, err := r.drive(ctx, s)
	switch {
	case err == nil:
	case ctx.Err() != nil, apierrors.IsConflict(err), apierrors.IsNotFound(err):
		// The next server continues after a shutdown; a changed object is reconciled again.
		return reconcile.Result{}, fmt.Errorf("run sandbox %s/%s: %w", s.Namespace, s.Name, err)
	case isMissing(err):
		return r.untilEnd(s), r.awaitObject(ctx, s, seen, err)
	case tried == suspend || tried == resume:
		return r.transitionFailed(ctx, s, seen, tried, err)
	default:
		return r.failed(ctx, s, seen, err)
	}
	if left := firstStatusDelay - time.Since(s.CreationTimestamp.Time); left > 0 && needsNoStatus(s, seen) {
		return soonerOf(r.untilEnd(s), left), nil
	}
	if err := r.writeStatus(ctx, s, statusOf(s, seen)); err != nil {
		return reconcile.Result{}, err
	}
	if seen.State == sandbox.ContainerRunning {
		// The claim has sent its variables to the agent. What is left to do would slow the first command.
		if wait := ClaimDelay(r.LastWarmClaim, barchan.ExactTime(s, pool.AnnotationClaimedAt)); wait > 0 {
			return soonerOf(r.untilEnd(s), wait), nil
		}
		if err := r.bind(ctx, s); err != nil {
			return reconcile.Result{}, err
		}
	}
	return r.untilEnd(s), nil
}

// needsNoStatus reports whether a sandbox without a status can do without one for now. No client waits for an unclaimed member that starts
// without trouble, and its status when it runs says all.
func needsNoStatus(s *agents.Sandbox, seen sandbox.Observed) bool {
	return seen.Progressing && pool.MemberOf(s) != "" && s.Status.Barchan == nil
}

// bind applies what a claim has added. The sandbox runs without it too, so a failure changes no status.
func (r *sandboxReconciler) bind(ctx context.Context, s *agents.Sandbox) error {
	err := r.Runner.Bind(ctx, s)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if missing, ok := errors.AsType[*podsource.Missing](err); ok { // its volumes stay as they are until the object is there again
		r.event(s, missing)
		return nil
	}
	if r.Events != nil {
		r.Events.Eventf(s, nil, corev1.EventTypeWarning, "BindFailed", "Bind", "%s", errs.Text(err))
	}
	if errors.Is(err, errs.ErrInvalid) { // a retry would not help
		r.Log.InfoContext(ctx, "sandbox change refused", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, err)
		return nil
	}
	return fmt.Errorf("bind sandbox %s/%s: %w", s.Namespace, s.Name, err)
}

// prepare runs before a start or resume, and before a status of the current generation is written.
func (r *sandboxReconciler) prepare(ctx context.Context, s *agents.Sandbox) error {
	if err := r.announceStart(ctx, s); err != nil {
		return err
	}
	return r.setEgress(ctx, s)
}

// setEgress applies the network policy. It runs before the status is written, because clients wait for a
// status of the generation that has their policy.
func (r *sandboxReconciler) setEgress(ctx context.Context, s *agents.Sandbox) error {
	err := r.Runner.SetEgress(ctx, s)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if r.Events != nil {
		r.Events.Eventf(s, nil, corev1.EventTypeWarning, "NetworkFailed", "SetNetwork", "%s", errs.Text(err))
	}
	return fmt.Errorf("set network policy of sandbox %s/%s: %w", s.Namespace, s.Name, err)
}

// mayStart reports whether a sandbox may start now. Only unclaimed members that have never run wait.
func (r *sandboxReconciler) mayStart(ctx context.Context, s *agents.Sandbox) bool {
	if pool.MemberOf(s) == "" || sandbox.Started(s) {
		return true
	}
	if !r.members.acquire(client.ObjectKeyFromObject(s)) {
		return false
	}
	r.awaitStartDelay(ctx, s)
	return true
}

// awaitStartDelay delays the start of a member while warm claims arrive. The start limit bounds the number
// of waiting workers.
func (r *sandboxReconciler) awaitStartDelay(ctx context.Context, s *agents.Sandbox) {
	delay := func() time.Duration { return ClaimDelay(r.LastWarmClaim, s.CreationTimestamp.Time) }
	for wait := delay(); wait > 0 && ctx.Err() == nil; wait = delay() {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// announceStart writes this node to the status before any slow step. If two servers see a sandbox without
// a node, only one write succeeds. In a cluster the creation of the Pod has that effect.
func (r *sandboxReconciler) announceStart(ctx context.Context, s *agents.Sandbox) error {
	if r.Node == "" || s.Status.NodeName != "" || s.Spec.OperatingMode == agents.ModeSuspended {
		return nil
	}
	failpoint.Reach("sandbox/seen")
	status := startingStatus(s)
	status.NodeName = r.Node
	return r.writeStatus(ctx, s, status)
}

// failed writes an error to the status. An error that only a user can fix is final.
func (r *sandboxReconciler) failed(ctx context.Context, s *agents.Sandbox, seen sandbox.Observed, cause error) (reconcile.Result, error) {
	text := errs.Text(cause)
	final := isFinal(cause)
	status := statusOf(s, seen)
	reason := agents.ReasonReconcilerError
	switch {
	case errors.Is(cause, sandbox.ErrImage):
		reason = sandbox.ReasonImage
	case errors.Is(cause, sandbox.ErrPodRefused):
		reason = sandbox.ReasonPodRefused
	case errors.Is(cause, sandbox.ErrInit) && final:
		reason = sandbox.ReasonInitError
	case errors.Is(cause, sandbox.ErrInit):
		reason = sandbox.ReasonInitFailed
	}
	setFailure(s, status, reason, text, final)
	if r.Events != nil {
		r.Events.Eventf(s, nil, corev1.EventTypeWarning, "Failed", "Run", "%s", text)
	}
	if err := r.writeStatus(ctx, s, status); err != nil {
		return reconcile.Result{}, err
	}
	if final {
		r.Log.InfoContext(ctx, "sandbox refused", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, cause)
		return r.untilEnd(s), nil
	}
	r.Log.WarnContext(ctx, "sandbox not reconciled; retrying", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, cause)
	return reconcile.Result{}, fmt.Errorf("run sandbox %s/%s: %w", s.Namespace, s.Name, cause)
}

// expire handles a passed shutdown time by one write, conditional on the version read, so that a concurrent
// extension by a client wins. The reconcile of that write removes the sandbox from the node. One of a cluster that would have to be
// paused with its memory ends instead: a pause that fails would leave it without an end.
func (r *sandboxReconciler) expire(ctx context.Context, s *agents.Sandbox) error {
	end := s.Spec.ShutdownTime.UTC().Format(time.RFC3339)
	pauses, why := s.Spec.Barchan != nil && s.Spec.Barchan.OnTimeout == agents.TimeoutPause, ""
	if pauses && r.Node == "" && !sandbox.Suspended(s) && !sandbox.SuspendsAsPod(s.Spec.Barchan) {
		pauses, why = false, fmt.Sprintf("; it was not paused by spec.barchan.onTimeout: Pause: %s, and spec.barchan.suspend is not %s", sandbox.NoMemory, agents.SuspendDelete)
	}
	var err error
	switch {
	case pauses:
		s.Spec.OperatingMode, s.Spec.ShutdownTime = agents.ModeSuspended, nil
		s.Spec.Barchan.Resume = agents.ResumeMemory // resets the mode of an earlier resume
		telemetry.Stamp(ctx, s)                     // no request is the cause
		err = r.Client.Update(ctx, s)
	case s.Spec.ShutdownPolicy == agents.ShutdownDelete:
		err = r.Client.Delete(ctx, s, client.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion})
	default:
		err = r.writeStatus(ctx, s, expiredStatus(s, why))
	}
	if err != nil {
		return fmt.Errorf("end expired sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	if r.Events != nil {
		r.Events.Eventf(s, nil, corev1.EventTypeNormal, "Expired", "Expire", "its shutdownTime %s has passed%s", end, why)
	}
	return nil
}

// clear removes an ended sandbox from the node, and then its finalizer. In a cluster an object that stays may have none, and
// what a deleted one owns is also collected without.
func (r *sandboxReconciler) clear(ctx context.Context, s *agents.Sandbox) error {
	if (r.Node != "" || s.DeletionTimestamp != nil) && !controllerutil.ContainsFinalizer(s, agents.NodeFinalizer) {
		return nil
	}
	r.refused.drop(s.UID)
	if err := r.Runner.Remove(ctx, refOf(s)); err != nil {
		if r.Events != nil && ctx.Err() == nil {
			r.Events.Eventf(s, nil, corev1.EventTypeWarning, "RemoveFailed", "Remove", "%s", errs.Text(err))
		}
		return fmt.Errorf("remove sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	failpoint.Reach("sandbox/removed")
	if !controllerutil.RemoveFinalizer(s, agents.NodeFinalizer) {
		return nil
	}
	if err := r.Client.Update(ctx, s); err != nil {
		return fmt.Errorf("release sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	failpoint.Reach("sandbox/released")
	r.Log.InfoContext(ctx, "sandbox removed", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name)
	return nil
}

// expired reports whether the status records the end of a retained sandbox.
func expired(s *agents.Sandbox) bool {
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	return c != nil && c.Reason == agents.ReasonSandboxExpired
}

// writeStatus writes a changed status, conditional on the version read.
func (r *sandboxReconciler) writeStatus(ctx context.Context, s *agents.Sandbox, status *agents.SandboxStatus) error {
	if apiequality.Semantic.DeepEqual(&s.Status, status) {
		return nil
	}
	before := s.Status
	s.Status = *status
	failpoint.Reach("sandbox/driven")
	if err := r.Client.Status().Update(ctx, s); err != nil {
		return fmt.Errorf("write status of sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	failpoint.Reach("sandbox/status")
	if r.Assumed != nil {
		r.Assumed.Assume(ctx, s)
	}
	r.recordEvents(s, &before, &s.Status)
	return nil
}

func (r *sandboxReconciler) untilEnd(s *agents.Sandbox) reconcile.Result {
	if left, ends := timeLeft(s); ends {
		return reconcile.Result{RequeueAfter: max(left, time.Millisecond)}
	}
	return reconcile.Result{}
}

func timeLeft(s *agents.Sandbox) (time.Duration, bool) {
	if s.Spec.ShutdownTime == nil {
		return 0, false
	}
	return time.Until(s.Spec.ShutdownTime.Time), true
}

func refOf(s *agents.Sandbox) sandbox.Ref {
	return sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID}
}
