package claim

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

// sources returns the watches of claims, pools, templates and sandboxes, and the free slots.
func (r *reconciler) sources(from crcache.Cache) []source.Source {
	return []source.Source{
		source.Func(func(_ context.Context, q controllers.Queue) error {
			r.slots.start(q.Add)
			r.enqueue = q.Add
			return nil
		}),
		source.Kind(from, &extensions.SandboxClaim{}, &handler.TypedEnqueueRequestForObject[*extensions.SandboxClaim]{},
			predicate.Or(controllers.SpecChanges[*extensions.SandboxClaim](), predicate.TypedAnnotationChangedPredicate[*extensions.SandboxClaim]{})),
		source.Kind(from, &extensions.SandboxWarmPool{}, handler.TypedEnqueueRequestsFromMapFunc(func(ctx context.Context, p *extensions.SandboxWarmPool) []reconcile.Request {
			return r.pending(ctx, client.ObjectKeyFromObject(p))
		}), controllers.SpecChanges[*extensions.SandboxWarmPool]()),
		source.Kind(from, &extensions.SandboxTemplate{}, handler.TypedEnqueueRequestsFromMapFunc(r.claimsOf), controllers.SpecChanges[*extensions.SandboxTemplate]()),
		controllers.Watch(from, &agents.Sandbox{}, r.changed),
	}
}

// claimsOf returns the claims without a sandbox on the pools of a template.
func (r *reconciler) claimsOf(ctx context.Context, t *extensions.SandboxTemplate) (all []reconcile.Request) {
	pools, err := r.Cache.PoolsOf(ctx, "", client.ObjectKeyFromObject(t))
	if err != nil {
		r.Log.ErrorContext(ctx, "pools of a changed template not found", telemetry.Template, t.Name, telemetry.Error, err)
	}
	for i := range pools {
		all = append(all, r.pending(ctx, client.ObjectKeyFromObject(&pools[i]))...)
	}
	return all
}

// pending returns the claims on a pool that have no sandbox.
func (r *reconciler) pending(ctx context.Context, key types.NamespacedName) (all []reconcile.Request) {
	claims, err := r.Cache.ClaimsOn(ctx, key)
	if err != nil {
		r.Log.ErrorContext(ctx, "claims on a changed pool not found", telemetry.Pool, key.String(), telemetry.Error, err)
	}
	for _, c := range claims {
		if c.Status.Sandbox.Name == "" {
			all = append(all, controllers.RequestFor(c))
		}
	}
	return all
}

// changed enqueues the claims that a sandbox change affects: its owner, one that waits for its name, and
// those that wait for its share of the quota.
func (r *reconciler) changed(_ context.Context, old, now *agents.Sandbox, q controllers.Queue) {
	s := now
	if s == nil {
		s = old
		q.Add(controllers.RequestFor(s))
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
