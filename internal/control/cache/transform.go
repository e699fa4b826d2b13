package cache

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// newTransform returns what is done to each object before the cache holds it.
func newTransform(ctx context.Context, trim bool, same func(context.Context, client.Object) client.Object) toolscache.TransformFunc {
	blueprints := sandbox.NewBlueprints()
	return func(o any) (any, error) {
		given := o
		if x, ok := o.(client.Object); ok && same != nil && !isSecret(x) {
			o = same(ctx, x)
		}
		if x, ok := o.(client.Object); ok && trim {
			x.SetManagedFields(nil)
		}
		if s, ok := o.(*agents.Sandbox); ok && o == given { // the other cache's objects share theirs
			blueprints.Share(&s.Spec.SandboxBlueprint)
		}
		switch x := o.(type) { // what is secret does not stay in memory
		case *corev1.Secret:
			x.Data = nil
			delete(x.Annotations, corev1.LastAppliedConfigAnnotation)
		case *metav1.PartialObjectMetadata:
			delete(x.Annotations, corev1.LastAppliedConfigAnnotation)
		}
		return o, nil
	}
}

// isSecret reports whether an object is a Secret, parts of which the cache deletes.
func isSecret(o client.Object) bool {
	_, is := o.(*corev1.Secret)
	_, meta := o.(*metav1.PartialObjectMetadata)
	return is || meta
}
