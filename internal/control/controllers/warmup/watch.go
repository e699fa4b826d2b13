package warmup

import (
	"cmp"
	"context"
	"strings"

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

// request encodes a templateKey. A template's name has no slash.
func (p templateKey) request() reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Namespace: p.namespace, Name: p.template.String()}}
}

func placeOf(req reconcile.Request) templateKey {
	namespace, name, _ := strings.Cut(req.Name, string(types.Separator))
	return templateKey{template: types.NamespacedName{Namespace: namespace, Name: name}, namespace: req.Namespace}
}

// of returns the key of an object created from a template.
func of(o client.Object) templateKey {
	return templateKey{template: pool.TemplateKey(o), namespace: o.GetNamespace()}
}

// sources returns the watches.
func (r *reconciler) sources(from crcache.Cache) []source.Source {
	return []source.Source{
		source.Kind(from, &extensions.SandboxTemplate{}, handler.TypedEnqueueRequestsFromMapFunc(r.placesOf)),
		source.Kind(from, &extensions.SandboxWarmPool{}, handler.TypedEnqueueRequestsFromMapFunc(func(_ context.Context, p *extensions.SandboxWarmPool) []reconcile.Request {
			return []reconcile.Request{templateKey{template: pool.TemplateOf(p), namespace: p.Namespace}.request()}
		})),
		source.Kind(from, &barchan.Checkpoint{}, handler.TypedEnqueueRequestsFromMapFunc(func(_ context.Context, c *barchan.Checkpoint) []reconcile.Request {
			if c.Labels[barchan.LabelPurpose] != barchan.PurposeWarm {
				return nil
			}
			return []reconcile.Request{of(c).request()}
		})),
		controllers.Watch(from, &agents.Sandbox{}, func(_ context.Context, old, now *agents.Sandbox, q controllers.Queue) {
			updated, s := old != nil && now != nil, cmp.Or(now, old)
			if updated && sandbox.PhaseOf(old) == sandbox.PhaseOf(now) {
				return
			}
			if pool.IsSeed(s) || (updated && sandbox.PhaseOf(now) == sandbox.Dead && isRestored(now)) {
				q.Add(of(s).request())
			}
		}),
	}
}

func isRestored(s *agents.Sandbox) bool {
	return s.Spec.Barchan != nil && s.Spec.Barchan.Restore != nil && s.Spec.Barchan.WarmUp != nil
}

// placesOf returns requests for the namespaces with pools or warm-up checkpoints of a template.
func (r *reconciler) placesOf(ctx context.Context, t *extensions.SandboxTemplate) (all []reconcile.Request) {
	key := client.ObjectKeyFromObject(t)
	pools, err := r.Objects.PoolsOf(ctx, "", key)
	if err == nil {
		var left []barchan.Checkpoint
		left, err = r.Objects.WarmCheckpoints(ctx, "", key)
		for i := range left {
			all = append(all, of(&left[i]).request())
		}
	}
	if err != nil {
		r.Log.ErrorContext(ctx, "pools of a changed template not found", telemetry.Namespace, t.Namespace, telemetry.Template, t.Name, telemetry.Error, err)
	}
	for i := range pools {
		all = append(all, templateKey{template: key, namespace: pools[i].Namespace}.request())
	}
	return all
}
