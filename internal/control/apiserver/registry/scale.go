package registry

import (
	"context"
	"fmt"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// scaleREST is the scale subresource of a kind.
type scaleREST struct {
	rest.TableConvertor
	store *Store
}

func newScaleREST(s *Store) *scaleREST {
	return &scaleREST{rest.NewDefaultTableConvertor(schema.GroupResource{Group: autoscalingv1.GroupName, Resource: "scales"}), s}
}

func (s *scaleREST) New() runtime.Object { return &autoscalingv1.Scale{} }

// Destroy implements rest.Storage; the kind's own storage is the one to destroy.
func (s *scaleREST) Destroy() {}

func (s *scaleREST) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return autoscalingv1.SchemeGroupVersion.WithKind("Scale")
}

func (s *scaleREST) Get(ctx context.Context, name string, opts *metav1.GetOptions) (runtime.Object, error) {
	o, err := s.store.Get(ctx, name, opts)
	if err != nil {
		return nil, err
	}
	return s.scaleOf(o), nil
}

func (s *scaleREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, _ rest.ValidateObjectFunc,
	validate rest.ValidateObjectUpdateFunc, _ bool, opts *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	validateParent := func(ctx context.Context, obj, old runtime.Object) error {
		if validate == nil {
			return nil
		}
		return validate(ctx, s.scaleOf(obj), s.scaleOf(old))
	}
	o, _, err := s.store.Update(ctx, name, scaleInfo{info, s}, rest.ValidateAllObjectFunc, validateParent, false, opts)
	if err != nil {
		return nil, false, err
	}
	return s.scaleOf(o), false, nil
}

func (s *scaleREST) scaleOf(o runtime.Object) *autoscalingv1.Scale {
	a := o.(metav1.Object)
	scale := s.store.Kind.Scale.Get(o)
	scale.ObjectMeta = metav1.ObjectMeta{
		Name: a.GetName(), Namespace: a.GetNamespace(), UID: a.GetUID(),
		ResourceVersion: a.GetResourceVersion(), CreationTimestamp: a.GetCreationTimestamp(),
	}
	return &scale
}

// scaleInfo turns a change of a scale into one of the scaled object.
type scaleInfo struct {
	change rest.UpdatedObjectInfo
	s      *scaleREST
}

func (i scaleInfo) Preconditions() *metav1.Preconditions { return i.change.Preconditions() }

// UpdatedObject implements rest.UpdatedObjectInfo. It converts the field owners to those of the
// scale and back.
func (i scaleInfo) UpdatedObject(ctx context.Context, old runtime.Object) (runtime.Object, error) {
	o := old.DeepCopyObject()
	a := o.(metav1.Object)
	gv := i.s.store.Kind.GV
	owners := managedfields.NewScaleHandler(a.GetManagedFields(), gv, managedfields.ResourcePathMappings{
		gv.String(): fieldpath.MakePathOrDie("spec", "replicas"),
	})
	var err error
	before := i.s.scaleOf(o)
	if before.ManagedFields, err = owners.ToSubresource(); err != nil {
		return nil, fmt.Errorf("read the scale's field owners: %w", err)
	}
	changed, err := i.change.UpdatedObject(ctx, before)
	if err != nil {
		return nil, err
	}
	scale, ok := changed.(*autoscalingv1.Scale)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("expected a Scale, got %T", changed))
	}
	i.s.store.Kind.Scale.Set(o, scale.Spec.Replicas)
	if scale.ResourceVersion != "" {
		a.SetResourceVersion(scale.ResourceVersion)
	}
	entries, err := owners.ToParent(scale.ManagedFields)
	if err != nil {
		return nil, fmt.Errorf("write the scale's field owners: %w", err)
	}
	a.SetManagedFields(entries)
	return o, nil
}
