package claim

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// reasonQuota is the reason of a claim that its namespace's quota refuses. Upstream has none.
const reasonQuota = "QuotaExceeded"

// find returns a sandbox that may be named as the claim's: what it owns already, a member, or in
// the end one that was started cold. It returns nil where the claim has to wait.
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
	if w.plan.cold != "" {
		return r.start(ctx, w)
	}
	return r.pick(ctx, w)
}

// resume goes through what the claim owns and has not named: one to name, or one that starts.
func (r *reconciler) resume(ctx context.Context, w *work) (ready, starting *agents.Sandbox, err error) {
	owned, err := r.owned(ctx, w)
	if err != nil {
		return nil, nil, err
	}
	for i := range owned {
		s := &owned[i]
		if w.known.gone[s.UID] {
			continue
		}
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

// owned returns what the claim owns. Where the cache may not show a write of this process yet,
// or its answer was lost, the API server is asked.
func (r *reconciler) owned(ctx context.Context, w *work) ([]agents.Sandbox, error) {
	found, err := r.cache.Owned(ctx, w.claim.UID)
	if err != nil {
		return nil, err
	}
	got := w.known.got
	for i := range found {
		if got != nil && found[i].UID == got.UID {
			got = nil
		}
	}
	if got == nil && !w.known.unsure {
		return found, nil
	}
	var list agents.SandboxList
	if err := r.client.List(ctx, &list, client.InNamespace(w.claim.Namespace), client.MatchingLabels{agents.LabelClaimUID: string(w.claim.UID)}); err != nil {
		return nil, fmt.Errorf("list the claim's sandboxes: %w", err)
	}
	w.known.unsure, w.known.got = false, nil
	found = found[:0]
	for i := range list.Items {
		if owns(w.claim, &list.Items[i]) {
			found = append(found, list.Items[i])
			w.known.got = &list.Items[i]
		}
	}
	return found, nil
}

// pick takes a member of the pool.
func (r *reconciler) pick(ctx context.Context, w *work) (*agents.Sandbox, reconcile.Result, error) {
	p := w.plan.pool
	if r.picker.Ready(p.UID, w.plan.revision) == 0 {
		if w.known.waits.IsZero() {
			w.known.waits = time.Now()
		}
		if time.Since(w.known.waits) > r.patience {
			return r.start(ctx, w)
		}
		if !r.turns.take(w.who, p.UID) {
			return nil, reconcile.Result{}, nil // the turn will call
		}
	}
	hold, err := r.hold(ctx, w)
	if err != nil {
		return r.overQuota(ctx, w, err)
	}
	s, tried, err := r.askPicker(ctx, w, hold)
	if err == nil {
		w.known.got, w.known.unsure = s, false
		return s, reconcile.Result{}, nil
	}
	hold.Release()
	if errors.Is(err, picker.ErrNone) {
		return r.start(ctx, w)
	}
	w.known.unsure = tried
	if errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrForbidden) {
		return nil, reconcile.Result{}, &refusal{extensions.ReasonClaimReconcilerFailed, "its sandbox cannot be written: " + errs.Text(err)}
	}
	if late := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errs.ErrTimeout); late && ctx.Err() == nil {
		return nil, reconcile.Result{RequeueAfter: retryFirst}, r.pend(ctx, w, fmt.Sprintf("waits for a member of warm pool %s", p.Name))
	}
	return nil, reconcile.Result{}, err
}

// askPicker asks for a member of the template's revision as it is now. tried tells whether a
// write was attempted. The picker may go on for a moment after it has returned.
func (r *reconciler) askPicker(ctx context.Context, w *work, hold *quota.Reservation) (s *agents.Sandbox, tried bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, waitForMember)
	defer cancel()
	var (
		wrote atomic.Bool
		asked atomic.Bool
		plans atomic.Pointer[plan]
	)
	plans.Store(w.plan)
	s, err = r.picker.Pick(ctx, picker.Request{
		Pool: w.plan.pool.UID,
		Current: func(ctx context.Context) (string, error) {
			if !asked.Swap(true) {
				return plans.Load().revision, nil // it was read a moment ago, in this look at the claim
			}
			again := &work{who: w.who, claim: w.claim}
			if err := r.replan(ctx, again, plans.Load().pool); err != nil {
				return "", err
			}
			plans.Store(again.plan)
			if again.plan.cold != "" {
				return "", picker.ErrNone
			}
			return again.plan.revision, nil
		},
		Adopt: func(member *agents.Sandbox) *agents.Sandbox {
			wrote.Store(true)
			hold.For(member.Name)
			return plans.Load().adopt(member)
		},
	})
	w.plan = plans.Load()
	return s, wrote.Load(), err
}

// hold asks the quota for one more sandbox.
func (r *reconciler) hold(ctx context.Context, w *work) (*quota.Reservation, error) {
	if r.quota == nil {
		return nil, nil //nolint:nilnil // nothing is to be reserved
	}
	size := r.quota.SizeOf(&w.plan.template.Spec.PodTemplate.Spec)
	return r.quota.Hold(ctx, quota.Request{Namespace: w.claim.Namespace, Size: size})
}

// overQuota records what the quota says. The claim is looked at when a sandbox of its namespace
// ends, and now and then in case that the quota has changed.
func (r *reconciler) overQuota(ctx context.Context, w *work, cause error) (*agents.Sandbox, reconcile.Result, error) {
	if !errors.Is(cause, errs.ErrExhausted) {
		return nil, reconcile.Result{}, cause
	}
	r.memory.refused(w.who)
	w.known.waits = time.Time{}
	_, err := r.write(ctx, w, waiting(w.claim, reasonQuota, errs.Text(cause)))
	return nil, reconcile.Result{RequeueAfter: quotaRetry}, err
}

// start starts a sandbox cold. It is named once it is ready, and still of the revision.
func (r *reconciler) start(ctx context.Context, w *work) (*agents.Sandbox, reconcile.Result, error) {
	hold, err := r.hold(ctx, w)
	if err != nil {
		return r.overQuota(ctx, w, err)
	}
	s := w.plan.fresh()
	if err := r.startWarm(ctx, w, s); err != nil {
		hold.Release()
		return nil, reconcile.Result{}, err
	}
	hold.For(s.Name)
	err = r.client.Create(ctx, s)
	w.known.unsure = true
	switch {
	case err == nil:
		failpoint.Reach("claimobject/made")
		w.known.got, w.known.unsure = s, false
		return nil, reconcile.Result{}, r.pend(ctx, w, w.plan.starts(s))
	case apierrors.IsAlreadyExists(err):
		hold.Release()
		w.known.unsure = false
		return nil, reconcile.Result{RequeueAfter: retryFirst}, r.nameTaken(ctx, w)
	case apierrors.IsInvalid(err), apierrors.IsForbidden(err), apierrors.IsBadRequest(err):
		hold.Release()
		w.known.unsure = false
		return nil, reconcile.Result{}, &refusal{extensions.ReasonClaimReconcilerFailed, "its sandbox cannot be started: " + err.Error()}
	default:
		hold.Release()
		return nil, reconcile.Result{}, fmt.Errorf("start sandbox %s: %w", s.Name, err)
	}
}

// startWarm has a sandbox that is not written yet start where its template's warm-up has run already. One
// that differs from the template in what only its start can bring starts as ever.
func (r *reconciler) startWarm(ctx context.Context, w *work, s *agents.Sandbox) error {
	if w.plan.cold != "" || !pool.KeepsWarmMemory(w.plan.template) {
		return nil
	}
	key := client.ObjectKey{Namespace: s.Namespace, Name: pool.WarmName(w.plan.template.Name, w.plan.revision)}
	c, err := r.cache.Checkpoint(ctx, key)
	if errors.Is(err, errs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the checkpoint of a warm-up: %w", err)
	}
	pool.StartWarm(s, pool.WarmCheckpoint(w.plan.template, w.plan.revision, []barchan.Checkpoint{*c}))
	return nil
}

// nameTaken finds out what has the name that a cold start needs.
func (r *reconciler) nameTaken(ctx context.Context, w *work) error {
	s := &agents.Sandbox{}
	if err := r.client.Get(ctx, client.ObjectKeyFromObject(w.claim), s); err != nil {
		return fmt.Errorf("read sandbox %s: %w", w.claim.Name, err)
	}
	owner := metav1.GetControllerOfNoCopy(s)
	switch {
	case owns(w.claim, s) && s.DeletionTimestamp == nil:
		w.known.got = s // the cache lags behind
		return nil
	case s.DeletionTimestamp != nil, owner != nil && owner.Kind == "SandboxClaim" && owner.Name == w.claim.Name:
		return r.pend(ctx, w, fmt.Sprintf("waits for an earlier sandbox %s to be gone", s.Name))
	default:
		return &refusal{extensions.ReasonAdoptionConflict, fmt.Sprintf("metadata.name: sandbox %s exists and is not the claim's; delete it, or give the claim another name", s.Name)}
	}
}

// pend says in the claim's status what it waits for.
func (r *reconciler) pend(ctx context.Context, w *work, what string) error {
	_, err := r.write(ctx, w, waiting(w.claim, extensions.ReasonSandboxCreatePending, what))
	return err
}
