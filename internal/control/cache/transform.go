package cache

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// newTransform returns what is done to each object before the cache holds it. What an object points to may be shared, and is not changed.
func newTransform(trim bool) toolscache.TransformFunc {
	blueprints := sandbox.NewBlueprints()
	return func(o any) (any, error) {
		if x, ok := o.(client.Object); ok && trim {
			x.SetManagedFields(nil)
		}
		switch x := o.(type) { // what is secret does not stay in memory
		case *agents.Sandbox:
			blueprints.Share(&x.Spec.SandboxBlueprint)
		case *corev1.Secret:
			x.Data = nil
			withoutApplied(x)
		case *metav1.PartialObjectMetadata:
			withoutApplied(x)
		}
		return o, nil
	}
}

// withoutApplied leaves out what kubectl applied, which has the values of a Secret.
func withoutApplied(o client.Object) {
	if _, has := o.GetAnnotations()[corev1.LastAppliedConfigAnnotation]; has {
		a := maps.Clone(o.GetAnnotations())
		delete(a, corev1.LastAppliedConfigAnnotation)
		o.SetAnnotations(a)
	}
}

// isMetadata reports whether an object has its metadata alone.
func isMetadata(o client.Object) bool {
	_, is := o.(*metav1.PartialObjectMetadata)
	return is
}
