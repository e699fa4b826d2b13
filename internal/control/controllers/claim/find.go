package claim

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/control/picker"
)

// find returns a sandbox to assign to the claim: one that it already owns, a member, or a cold start.
// It returns nil while the claim waits.
func (r *reconciler) find(ctx context.Context, w *work) (*agents.Sandbox, reconcile.Result, error) {
	if err := r.look(ctx, w); err != nil {
		return nil, reconcile.Result{}, err
	}
	s, starting, err := r.resume(ctx, w)
	if s != nil || err != nil {
		return s, reconcile.Result{}, err
	}
	if starting != nil {
		return nil, reconcile.Result{}, r.pend(ctx, w, w.plan.starts(starting))
	}
	if b := w.plan.template.Spec.Barchan; b != nil {
		if err := r.Quota.CheckAutoPause(ctx, w.claim.Namespace, b.Sandbox); errors.Is(err, errs.ErrExhausted) {
			return r.overQuota(ctx, w, err)
		} else if err != nil {
			return nil, reconcile.Result{}, err
		}
	}
	if waits, result, err := r.queue(ctx, w); waits || err != nil {
		return nil, result, err
	}
	w.op.Waited(w.known.waited())
	if w.plan.cold != "" {
		return r.start(ctx, w)
	}
	return r.pick(ctx, w)
}

// resume checks the owned sandboxes that are not assigned: one may be assignable or starting.
func (r *reconciler) resume(ctx context.Context, w *work) (ready, starting *agents.Sandbox, err error) {
	owned, err := r.owned(ctx, w)
	if err != nil {
		return nil, nil, err
	}
	for _, s := range owned {
		switch w.plan.judge(s) {
		case name:
			ready = s
		case await:
			starting = s
		case drop:
			if err := r.drop(ctx, w, s); err != nil {
				return nil, nil, err
			}
		case leave:
		}
	}
	return ready, starting, nil
}

// owned returns the sandboxes that the claim owns. After a write of unknown outcome the API server is
// read.
func (r *reconciler) owned(ctx context.Context, w *work) ([]*agents.Sandbox, error) {
	if !w.known.unsure {
		found, err := r.Cache.Owned(ctx, w.claim.UID)
		if err != nil {
			return nil, err
		}
		return r.Assumed.Merge(found, func(s *agents.Sandbox) bool { return owns(w.claim, s) }), nil
	}
	var list agents.SandboxList
	if err := r.Client.List(ctx, &list, client.InNamespace(w.claim.Namespace), client.MatchingLabels{agents.LabelClaimUID: string(w.claim.UID)}); err != nil {
		return nil, fmt.Errorf("list the claim's sandboxes: %w", err)
	}
	w.known.unsure = false
	var found []*agents.Sandbox
	for i := range list.Items {
		if s := &list.Items[i]; owns(w.claim, s) && !r.Assumed.Deleted(s.UID) {
			r.Assumed.Assume(ctx, s)
			found = append(found, s)
		}
	}
	return found, nil
}

// pick takes a member of the pool.
func (r *reconciler) pick(ctx context.Context, w *work) (*agents.Sandbox, reconcile.Result, error) {
	p := w.pool
	if r.Picker.Ready(p.UID, client.ObjectKeyFromObject(w.plan.template), w.plan.revision) == 0 {
		if w.known.waits.IsZero() {
			w.known.waits = time.Now()
		}
		if time.Since(w.known.waits) > r.Patience {
			return r.start(ctx, w)
		}
		if !r.slots.acquire(w.req, p.UID) {
			return nil, reconcile.Result{}, nil // a free slot enqueues the claim
		}
	}
	bounded, cancel := context.WithTimeout(ctx, waitForMember)
	defer cancel()
	s, err := w.op.TakeWarm(bounded, p.UID)
	switch {
	case err == nil:
		w.known.unsure = false
		w.known.spend()
		return s, reconcile.Result{}, nil
	case errors.Is(err, picker.ErrNone):
		return r.start(ctx, w)
	case errors.Is(err, errs.ErrExhausted):
		return r.overQuota(ctx, w, err)
	}
	w.release()
	w.known.unsure = w.op.Wrote()
	if errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrForbidden) {
		return nil, reconcile.Result{}, unwritable("its sandbox cannot be written: "+errs.Text(err), err)
	}
	if late := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errs.ErrTimeout); late && ctx.Err() == nil {
		return nil, reconcile.Result{RequeueAfter: retryFirst}, r.pend(ctx, w, fmt.Sprintf("waits for a member of warm pool %s", p.Name))
	}
	return nil, reconcile.Result{}, err
}

// overQuota records a refusal by the quota. The claim is reconciled when a sandbox of its namespace ends,
// and every quotaRetry, because the quota can change.
func (r *reconciler) overQuota(ctx context.Context, w *work, cause error) (*agents.Sandbox, reconcile.Result, error) {
	r.attempts.refused(w.req)
	w.known.block()
	w.known.leaveQueue()
	w.known.waits = time.Time{}
	_, err := r.write(ctx, w, waiting(w.claim, extensions.ReasonQuotaExceeded, errs.Text(cause)))
	return nil, reconcile.Result{RequeueAfter: quotaRetry}, err
}

// start creates a sandbox for a cold start. It is assigned when it is ready with the current revision.
func (r *reconciler) start(ctx context.Context, w *work) (*agents.Sandbox, reconcile.Result, error) {
	s, err := w.op.Create(ctx, true)
	if err == nil {
		failpoint.Reach("claimobject/made")
		w.known.unsure = false
		w.known.spend()
		return nil, reconcile.Result{}, r.pend(ctx, w, w.plan.starts(s))
	}
	w.release()
	switch {
	case s == nil && errors.Is(err, errs.ErrExhausted):
		return r.overQuota(ctx, w, err)
	case s == nil:
		return nil, reconcile.Result{}, err
	case apierrors.IsAlreadyExists(err):
		w.known.unsure = false
		return nil, reconcile.Result{RequeueAfter: retryFirst}, r.nameTaken(ctx, w)
	case apierrors.IsInvalid(err), apierrors.IsForbidden(err), apierrors.IsBadRequest(err):
		w.known.unsure = false
		return nil, reconcile.Result{}, unwritable("its sandbox cannot be started: "+err.Error(), err)
	}
	w.known.unsure = true
	return nil, reconcile.Result{}, fmt.Errorf("start sandbox %s: %w", s.Name, err)
}

// unwritable returns the refusal of a write by the API server. What forbids one may end without an event, as a ResourceQuota or an
// API server that does not know all rights yet.
func unwritable(message string, err error) *refusal {
	no := &refusal{reason: extensions.ReasonClaimReconcilerFailed, message: message}
	if apierrors.IsForbidden(err) {
		no.retry = err
	}
	return no
}

// nameTaken reads the existing sandbox with the name of a cold start.
func (r *reconciler) nameTaken(ctx context.Context, w *work) error {
	s := &agents.Sandbox{}
	if err := r.Client.Get(ctx, client.ObjectKeyFromObject(w.claim), s); err != nil {
		return fmt.Errorf("read sandbox %s: %w", w.claim.Name, err)
	}
	owner := metav1.GetControllerOfNoCopy(s)
	switch {
	case owns(w.claim, s) && s.DeletionTimestamp == nil:
		r.Assumed.Assume(ctx, s) // the cache lags behind
		return nil
	case s.DeletionTimestamp != nil, owner != nil && owner.Kind == "SandboxClaim" && owner.Name == w.claim.Name:
		return r.pend(ctx, w, fmt.Sprintf("waits for an earlier sandbox %s to be gone", s.Name))
	default:
		return &refusal{
			reason:  extensions.ReasonAdoptionConflict,
			message: fmt.Sprintf("metadata.name: sandbox %s exists and is not the claim's; delete it, or give the claim another name", s.Name),
		}
	}
}

// pend writes to the claim's status why it waits.
func (r *reconciler) pend(ctx context.Context, w *work, what string) error {
	_, err := r.write(ctx, w, waiting(w.claim, extensions.ReasonSandboxCreatePending, what))
	return err
}
