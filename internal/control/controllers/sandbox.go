package controllers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

type sandboxReconciler struct {
	log    *slog.Logger
	client client.Client
	cache  client.Reader
	runner Runner
	// node is the name of the machine: sandboxes of others are left alone.
	node   string
	events events.EventRecorder
	// members is passed by unclaimed members of pools that have never run.
	members *startLimiter
	served  func() time.Time // nil: unknown
	origins Origins          // nil: what a sandbox starts from is not waited for
	// forkSecrets lets all start from what holds secrets.
	forkSecrets bool
	refused     *refusals
}

// Reconcile does one step for one sandbox.
func (r *sandboxReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	defer r.members.pass(req.NamespacedName)
	s := &agents.Sandbox{}
	if err := r.cache.Get(ctx, req.NamespacedName, s); err != nil {
		if apierrors.IsNotFound(err) {
			r.runner.ObjectDeleted(req.Namespace, req.Name)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if s.Status.NodeName != "" && s.Status.NodeName != r.node {
		r.log.DebugContext(ctx, "sandbox of another node left alone", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Node, s.Status.NodeName)
		return reconcile.Result{}, nil
	}
	result, err := r.step(ctx, s)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		// Somebody else wrote first: their write is an event that brings us back.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	return result, err
}

func (r *sandboxReconciler) step(ctx context.Context, s *agents.Sandbox) (reconcile.Result, error) {
	if s.DeletionTimestamp != nil {
		return reconcile.Result{}, r.clear(ctx, s)
	}
	if expired(s) { // its end is noted, and stands whatever its shutdownTime says now
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
	if controllerutil.AddFinalizer(s, agents.NodeFinalizer) {
		// Intent first: what the finalizer does not hold must not be started.
		if err := r.client.Update(ctx, s); err != nil {
			return reconcile.Result{}, fmt.Errorf("add finalizer to sandbox %s/%s: %w", s.Namespace, s.Name, err)
		}
	}
	if waits, err := r.awaitsOrigin(ctx, s); err != nil && ctx.Err() == nil {
		return r.failed(ctx, s, sandbox.Observed{}, err)
	} else if waits || err != nil {
		return r.untilEnd(s), err
	}
	return r.bring(ctx, s)
}

// bring has the node make of a sandbox what its spec wants, if it is its turn, and writes what came of
// it.
func (r *sandboxReconciler) bring(ctx context.Context, s *agents.Sandbox) (reconcile.Result, error) {
	if !r.mayStart(ctx, s) {
		return r.untilEnd(s), nil
	}
	if err := r.prepare(ctx, s); err != nil {
		return reconcile.Result{}, err
	}
	seen, tried, err := r.drive(ctx, s)
	switch {
	case err == nil:
	case ctx.Err() != nil, apierrors.IsConflict(err), apierrors.IsNotFound(err):
		// A server that stops leaves it to the next one, and what has changed is looked at again.
		return reconcile.Result{}, fmt.Errorf("run sandbox %s/%s: %w", s.Namespace, s.Name, err)
	case tried == suspend || tried == resume:
		return r.missed(ctx, s, seen, tried, err)
	default:
		return r.failed(ctx, s, seen, err)
	}
	if err := r.writeStatus(ctx, s, statusOf(s, seen)); err != nil {
		return reconcile.Result{}, err
	}
	if seen.State == sandbox.ContainerRunning {
		if err := r.bind(ctx, s); err != nil {
			return reconcile.Result{}, err
		}
	}
	return r.untilEnd(s), nil
}

// bind has the node keep what a sandbox got when it was claimed. It runs either way: a failure
// says nothing about its health, and changes no status.
func (r *sandboxReconciler) bind(ctx context.Context, s *agents.Sandbox) error {
	err := r.runner.Bind(ctx, s)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if r.events != nil {
		r.events.Eventf(s, nil, corev1.EventTypeWarning, "BindFailed", "Bind", "%s", errs.Text(err))
	}
	if errors.Is(err, errs.ErrInvalid) { // another try would not help
		r.log.InfoContext(ctx, "change of a sandbox refused", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, err)
		return nil
	}
	return fmt.Errorf("bind sandbox %s/%s: %w", s.Namespace, s.Name, err)
}

// prepare does what comes before a sandbox is started or woken, and before its status is of this
// generation.
func (r *sandboxReconciler) prepare(ctx context.Context, s *agents.Sandbox) error {
	if err := r.announceStart(ctx, s); err != nil {
		return err
	}
	return r.limit(ctx, s)
}

// limit has the node put in force what the sandbox may reach now. Whoever changed it waits for a
// status of the same generation, which there is not before this has succeeded.
func (r *sandboxReconciler) limit(ctx context.Context, s *agents.Sandbox) error {
	err := r.runner.SetEgress(ctx, s)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if r.events != nil {
		r.events.Eventf(s, nil, corev1.EventTypeWarning, "NetworkFailed", "SetNetwork", "%s", errs.Text(err))
	}
	return fmt.Errorf("set what sandbox %s/%s may reach: %w", s.Namespace, s.Name, err)
}

// mayStart reports whether it is a sandbox's turn. Only unclaimed members that have never run wait.
func (r *sandboxReconciler) mayStart(ctx context.Context, s *agents.Sandbox) bool {
	if pool.MemberOf(s) == "" || sandbox.Started(s) {
		return true
	}
	if !r.members.enter(client.ObjectKeyFromObject(s)) {
		return false
	}
	r.awaitCalm(ctx, s)
	return true
}

// awaitCalm has a member whose turn it is wait for claims to stop coming. The gate bounds how many
// workers wait so.
func (r *sandboxReconciler) awaitCalm(ctx context.Context, s *agents.Sandbox) {
	for wait := r.untilCalm(s); wait > 0 && ctx.Err() == nil; wait = r.untilCalm(s) {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// untilCalm is how long a member should wait for claims to stop coming.
func (r *sandboxReconciler) untilCalm(s *agents.Sandbox) time.Duration {
	if r.served == nil || time.Since(s.CreationTimestamp.Time) >= patience {
		return 0
	}
	return calm - time.Since(r.served())
}

// announceStart writes that this node runs the sandbox, before it does anything that may take long. Of
// two servers that see it without a node, one succeeds, and the other does nothing.
func (r *sandboxReconciler) announceStart(ctx context.Context, s *agents.Sandbox) error {
	if s.Status.NodeName != "" || s.Spec.OperatingMode == agents.ModeSuspended {
		return nil
	}
	failpoint.Reach("sandbox/seen")
	status := startingStatus(s)
	status.NodeName = r.node
	return r.writeStatus(ctx, s, status)
}

// failed records why the sandbox is not as wanted. What only the user can mend is final.
func (r *sandboxReconciler) failed(ctx context.Context, s *agents.Sandbox, seen sandbox.Observed, cause error) (reconcile.Result, error) {
	text := errs.Text(cause)
	final := isFinal(cause)
	status := statusOf(s, seen)
	reason := agents.ReasonReconcilerError
	if errors.Is(cause, sandbox.ErrImage) {
		reason = sandbox.ReasonImage
	}
	setFailure(s, status, reason, text, final)
	if r.events != nil {
		r.events.Eventf(s, nil, corev1.EventTypeWarning, "Failed", "Run", "%s", text)
	}
	if err := r.writeStatus(ctx, s, status); err != nil {
		return reconcile.Result{}, err
	}
	if final {
		r.log.InfoContext(ctx, "sandbox refused", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, cause)
		return r.untilEnd(s), nil
	}
	r.log.WarnContext(ctx, "sandbox not as wanted, retrying", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, cause)
	return reconcile.Result{}, fmt.Errorf("run sandbox %s/%s: %w", s.Namespace, s.Name, cause)
}

// expire acts on a shutdown time that has passed. It only writes, over the version that was read: where
// a client has extended the sandbox meanwhile, nothing ends. What it wrote has the node clear up.
func (r *sandboxReconciler) expire(ctx context.Context, s *agents.Sandbox) error {
	end := s.Spec.ShutdownTime.UTC().Format(time.RFC3339)
	var err error
	switch {
	case s.Spec.Barchan != nil && s.Spec.Barchan.OnTimeout == agents.TimeoutPause:
		s.Spec.OperatingMode, s.Spec.ShutdownTime = agents.ModeSuspended, nil
		s.Spec.Barchan.Resume = agents.ResumeMemory // what was wanted of an earlier resume is done
		err = r.client.Update(ctx, s)
	case s.Spec.ShutdownPolicy == agents.ShutdownDelete:
		err = r.client.Delete(ctx, s, client.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion})
	default:
		err = r.writeStatus(ctx, s, expiredStatus(s))
	}
	if err != nil {
		return fmt.Errorf("end expired sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	if r.events != nil {
		r.events.Eventf(s, nil, corev1.EventTypeNormal, "Expired", "Expire", "its shutdownTime %s has passed", end)
	}
	return nil
}

// clear removes from the node what has ended for good, and then lets the object go.
func (r *sandboxReconciler) clear(ctx context.Context, s *agents.Sandbox) error {
	if !controllerutil.ContainsFinalizer(s, agents.NodeFinalizer) {
		return nil
	}
	r.refused.drop(s.UID)
	if err := r.runner.Remove(ctx, refOf(s)); err != nil {
		if r.events != nil && ctx.Err() == nil {
			r.events.Eventf(s, nil, corev1.EventTypeWarning, "RemoveFailed", "Remove", "%s", errs.Text(err))
		}
		return fmt.Errorf("remove sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	failpoint.Reach("sandbox/removed")
	controllerutil.RemoveFinalizer(s, agents.NodeFinalizer)
	if err := r.client.Update(ctx, s); err != nil {
		return fmt.Errorf("release sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	failpoint.Reach("sandbox/released")
	r.log.InfoContext(ctx, "sandbox removed", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name)
	return nil
}

// expired reports whether the end of a retained sandbox has been noted.
func expired(s *agents.Sandbox) bool {
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	return c != nil && c.Reason == agents.ReasonSandboxExpired
}

// writeStatus writes only what differs, and only over the version that was read.
func (r *sandboxReconciler) writeStatus(ctx context.Context, s *agents.Sandbox, status *agents.SandboxStatus) error {
	if apiequality.Semantic.DeepEqual(&s.Status, status) {
		return nil
	}
	before := s.Status
	s.Status = *status
	failpoint.Reach("sandbox/driven")
	if err := r.client.Status().Update(ctx, s); err != nil {
		return fmt.Errorf("write status of sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	failpoint.Reach("sandbox/status")
	r.tell(s, &before, &s.Status)
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
