package claim

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// sources returns the watches of claims, pools, templates and sandboxes, and the free slots.
func (r *reconciler) sources(from crcache.Cache) []source.Source {
	return []source.Source{
		source.Func(func(_ context.Context, q queue) error {
			r.slots.start(q.Add)
			return nil
		}),
		source.Kind(from, &extensions.SandboxClaim{}, &handler.TypedEnqueueRequestForObject[*extensions.SandboxClaim]{}, specChanges[*extensions.SandboxClaim]()),
		source.Kind(from, &extensions.SandboxWarmPool{}, handler.TypedEnqueueRequestsFromMapFunc(func(ctx context.Context, p *extensions.SandboxWarmPool) []reconcile.Request {
			return r.pending(ctx, client.ObjectKeyFromObject(p))
		}), specChanges[*extensions.SandboxWarmPool]()),
		source.Kind(from, &extensions.SandboxTemplate{}, handler.TypedEnqueueRequestsFromMapFunc(r.claimsOf), specChanges[*extensions.SandboxTemplate]()),
		source.Kind(from, &agents.Sandbox{}, handler.TypedFuncs[*agents.Sandbox, reconcile.Request]{
			CreateFunc: func(_ context.Context, e event.TypedCreateEvent[*agents.Sandbox], q queue) {
				r.changed(nil, e.Object, q)
			},
			UpdateFunc: func(_ context.Context, e event.TypedUpdateEvent[*agents.Sandbox], q queue) {
				r.changed(e.ObjectOld, e.ObjectNew, q)
			},
			DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[*agents.Sandbox], q queue) {
				r.changed(e.Object, nil, q)
			},
		}),
	}
}

// specChanges passes changes by users, not status writes by controllers.
func specChanges[T client.Object]() predicate.TypedPredicate[T] {
	return predicate.TypedFuncs[T]{UpdateFunc: func(e event.TypedUpdateEvent[T]) bool {
		return e.ObjectOld.GetGeneration() != e.ObjectNew.GetGeneration() || e.ObjectOld.GetUID() != e.ObjectNew.GetUID() ||
			(e.ObjectOld.GetDeletionTimestamp() == nil) != (e.ObjectNew.GetDeletionTimestamp() == nil)
	}}
}

// claimsOf returns the claims without a sandbox on the pools of a template.
func (r *reconciler) claimsOf(ctx context.Context, t *extensions.SandboxTemplate) (all []reconcile.Request) {
	pools, err := r.cache.PoolsOf(ctx, "", client.ObjectKeyFromObject(t))
	if err != nil {
		r.log.ErrorContext(ctx, "pools of a changed template not found", telemetry.Template, t.Name, telemetry.Error, err)
	}
	for i := range pools {
		all = append(all, r.pending(ctx, client.ObjectKeyFromObject(&pools[i]))...)
	}
	return all
}

// pending returns the claims on a pool that have no sandbox.
func (r *reconciler) pending(ctx context.Context, key types.NamespacedName) (all []reconcile.Request) {
	claims, err := r.cache.ClaimsOn(ctx, key)
	if err != nil {
		r.log.ErrorContext(ctx, "claims on a changed pool not found", telemetry.Pool, key.String(), telemetry.Error, err)
	}
	for i := range claims {
		if claims[i].Status.Sandbox.Name == "" {
			all = append(all, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&claims[i])})
		}
	}
	return all
}

// changed enqueues the claims that a sandbox change affects: its owner, one that waits for its name, and
// those that wait for its share of the quota.
func (r *reconciler) changed(old, now *agents.Sandbox, q queue) {
	s := now
	if s == nil {
		s = old
		q.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(s)})
	}
	if owner := metav1.GetControllerOfNoCopy(s); owner != nil && owner.Kind == "SandboxClaim" {
		q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: s.Namespace, Name: owner.Name}})
	}
	if old != nil && pool.MemberOf(old) == "" && counts(old) && (now == nil || !counts(now)) {
		for _, req := range r.attempts.overQuota(s.Namespace) {
			q.Add(req)
		}
	}
}

// counts reports whether a sandbox counts against a quota: it has not ended and is not paused.
func counts(s *agents.Sandbox) bool { return !sandbox.DeadForGood(s) && !sandbox.Suspended(s) }
