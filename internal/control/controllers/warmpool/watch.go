package warmpool

import (
	"cmp"
	"context"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

// sources are the events that reconcile a pool.
func (r *reconciler) sources(c crcache.Cache) []source.Source {
	return []source.Source{
		controllers.Watch(c, &extensions.SandboxWarmPool{}, func(_ context.Context, old, now *extensions.SandboxWarmPool, q controllers.Queue) {
			if now == nil {
				q.Add(controllers.RequestFor(old))
				return
			}
			r.names.Store(now.UID, client.ObjectKeyFromObject(now))
			if old == nil || old.Generation != now.Generation || old.UID != now.UID || now.DeletionTimestamp != nil {
				q.Add(controllers.RequestFor(now))
			}
		}),
		source.Kind(c, &extensions.SandboxTemplate{}, handler.TypedEnqueueRequestsFromMapFunc(func(ctx context.Context, t *extensions.SandboxTemplate) []reconcile.Request {
			return r.pools(ctx, "", client.ObjectKeyFromObject(t))
		})),
		controllers.Watch(c, &agents.Sandbox{}, func(ctx context.Context, old, now *agents.Sandbox, q controllers.Queue) {
			r.expected.observe(cmp.Or(now, old))
			if old != nil && now != nil && markOf(old) == markOf(now) {
				return
			}
			for _, s := range []*agents.Sandbox{old, now} {
				if s != nil {
					r.enqueue(ctx, q, s)
				}
			}
		}),
		source.Kind(c, &barchan.Checkpoint{}, handler.TypedEnqueueRequestsFromMapFunc(func(ctx context.Context, c *barchan.Checkpoint) []reconcile.Request {
			if r.WarmUps == nil || c.Labels[barchan.LabelPurpose] != barchan.PurposeWarm {
				return nil
			}
			return r.poolsWarmedBy(ctx, c)
		})),
	}
}

// poolsWarmedBy are those of the template of a seed, or of its checkpoint.
func (r *reconciler) poolsWarmedBy(ctx context.Context, o client.Object) []reconcile.Request {
	return r.pools(ctx, o.GetNamespace(), pool.TemplateKey(o))
}

func (r *reconciler) pools(ctx context.Context, namespace string, template types.NamespacedName) (all []reconcile.Request) {
	pools, err := r.Objects.PoolsOf(ctx, namespace, template)
	if err != nil {
		r.Log.ErrorContext(ctx, "cannot find pools of changed template", telemetry.Template, template.String(), telemetry.Error, err)
	}
	for i := range pools {
		all = append(all, controllers.RequestFor(&pools[i]))
	}
	return all
}

// mark is the part of a sandbox that its pool depends on.
type mark struct {
	member, origin types.UID
	revision       string
	phase          sandbox.Phase
	why            string
	owner          types.UID
	scheduled      bool
}

func markOf(s *agents.Sandbox) mark {
	m := mark{member: pool.MemberOf(s), origin: pool.OriginOf(s)}
	if m.member == "" {
		if m.origin != "" && sandbox.DeadForGood(s) { // of claimed ones, only whether they are dead
			m.phase = sandbox.Dead
		}
		return m
	}
	m.revision, m.phase, m.scheduled = pool.RevisionOf(s), sandbox.PhaseOf(s), !unschedulable(s)
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); c != nil {
		m.why = c.Reason
	}
	if ref := metav1.GetControllerOfNoCopy(s); ref != nil {
		m.owner = ref.UID
	}
	return m
}

func unschedulable(s *agents.Sandbox) bool {
	return meta.IsStatusConditionFalse(s.Status.Conditions, agents.ConditionPodScheduled)
}

// enqueue reconciles the pool of a sandbox after Coalesce.
func (r *reconciler) enqueue(ctx context.Context, q controllers.Queue, s *agents.Sandbox) {
	if pool.IsInternal(s) {
		if r.WarmUps != nil {
			for _, req := range r.poolsWarmedBy(ctx, s) {
				q.AddAfter(req, r.Coalesce)
			}
		}
		return
	}
	uid := cmp.Or(pool.MemberOf(s), pool.OriginOf(s))
	if uid == "" {
		return
	}
	req := orphansOf(s.Namespace, uid)
	if key, ok := r.names.Load(uid); ok {
		req.NamespacedName = key.(types.NamespacedName) //nolint:forcetypeassert // all values are
	} else if !orphan(s) {
		return // its pool is not in the cache yet, or garbage collection deletes both
	}
	q.AddAfter(req, r.Coalesce)
}

// orphanLead cannot be part of an object's name.
const orphanLead = "uid/"

// orphansOf requests a pass over members of an unknown pool.
func orphansOf(namespace string, uid types.UID) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: orphanLead + string(uid)}}
}

func isOrphans(req reconcile.Request) (uid types.UID, yes bool) {
	text, yes := strings.CutPrefix(req.Name, orphanLead)
	return types.UID(text), yes
}
