package registry

import (
	"context"
	"reflect"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/barchan-dev/barchan/internal/control/apiserver/kinds"
)

// strategy implements the create, update and delete strategies of a kind.
type strategy struct {
	runtime.ObjectTyper
	names.NameGenerator
	r            *kinds.Resource
	admit, bound AdmissionFunc
}

func (s strategy) NamespaceScoped() bool { return s.r.Namespaced }

// AllowCreateOnUpdate implements the update strategy: a PUT never creates.
func (s strategy) AllowCreateOnUpdate(context.Context) bool { return false }

// AllowUnconditionalUpdate implements the update strategy: a PUT of our kinds must name the
// version that it changes, as Kubernetes requires for custom resources.
func (s strategy) AllowUnconditionalUpdate(context.Context) bool { return !s.r.Generation }

func (s strategy) WarningsOnCreate(_ context.Context, o runtime.Object) []string {
	if s.r.Warn == nil {
		return nil
	}
	return s.r.Warn(o)
}

func (s strategy) WarningsOnUpdate(ctx context.Context, o, _ runtime.Object) []string {
	return s.WarningsOnCreate(ctx, o)
}

func (s strategy) Canonicalize(runtime.Object) {}

// PrepareForCreate implements the create strategy: users do not write status.
func (s strategy) PrepareForCreate(_ context.Context, o runtime.Object) {
	if s.r.Status {
		fieldOf(o, "Status").SetZero()
	}
	if s.r.Generation {
		o.(metav1.Object).SetGeneration(1)
	}
	s.complete(o, nil)
}

// PrepareForUpdate implements the update strategy: status stays, and a changed spec is counted.
func (s strategy) PrepareForUpdate(_ context.Context, o, old runtime.Object) {
	if s.r.Status {
		fieldOf(o, "Status").Set(fieldOf(old, "Status"))
	}
	s.complete(o, old)
	if s.r.Generation {
		g := old.(metav1.Object).GetGeneration()
		if s.changed(o, old) {
			g++
		}
		o.(metav1.Object).SetGeneration(g)
	}
}

func (s strategy) complete(o, old runtime.Object) {
	if s.r.Defaults != nil {
		s.r.Defaults(o)
	}
	if s.r.Prepare != nil {
		s.r.Prepare(o, old)
	}
}

// changed reports whether an update changes what the kind's validation covers.
func (s strategy) changed(o, old runtime.Object) bool {
	if !s.r.Generation {
		return true
	}
	return !apiequality.Semantic.DeepEqual(fieldOf(o, "Spec").Interface(), fieldOf(old, "Spec").Interface())
}

func (s strategy) Validate(ctx context.Context, o runtime.Object) field.ErrorList {
	return append(append(s.checkBound(ctx, o, nil), s.validateName(o)...), s.validateRules(ctx, o, nil)...)
}

// ValidateUpdate implements the update strategy. It skips the rules of an object whose spec did not change:
// stricter ones would otherwise keep its finalizers, and so the object, in place.
func (s strategy) ValidateUpdate(ctx context.Context, o, old runtime.Object) field.ErrorList {
	errs := s.checkBound(ctx, o, old)
	if len(errs) > 0 || !s.changed(o, old) {
		return errs
	}
	return s.validateRules(ctx, o, old)
}

func (s strategy) checkBound(ctx context.Context, o, old runtime.Object) field.ErrorList {
	if s.bound == nil {
		return nil
	}
	return s.bound(ctx, o, old)
}

func (s strategy) validateRules(ctx context.Context, o, old runtime.Object) (errs field.ErrorList) {
	if s.r.Validate != nil {
		errs = s.r.Validate(o, old)
	}
	if len(errs) == 0 && s.admit != nil {
		errs = s.admit(ctx, o, old)
	}
	return errs
}

func (s strategy) validateName(o runtime.Object) field.ErrorList {
	check := s.r.CheckName
	if check == nil {
		check = apivalidation.NameIsDNSSubdomain
	}
	return apivalidation.ValidateObjectMetaAccessor(o.(metav1.Object), s.r.Namespaced, check, field.NewPath("metadata"))
}

// GetResetFields implements rest.ResetFieldsStrategy: server-side apply of the object itself
// owns no field of its status.
func (s strategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	if !s.r.Status {
		return nil
	}
	return s.resets("status")
}

func (s strategy) resets(name string) map[fieldpath.APIVersion]*fieldpath.Set {
	return map[fieldpath.APIVersion]*fieldpath.Set{fieldpath.APIVersion(s.r.GV.String()): fieldpath.NewSet(fieldpath.MakePathOrDie(name))}
}

// statusStrategy changes status alone.
type statusStrategy struct{ strategy }

// PrepareForUpdate implements the update strategy: everything but status stays.
func (s statusStrategy) PrepareForUpdate(_ context.Context, o, old runtime.Object) {
	fieldOf(o, "Spec").Set(fieldOf(old, "Spec"))
	n, p := o.(metav1.Object), old.(metav1.Object)
	n.SetLabels(p.GetLabels())
	n.SetAnnotations(p.GetAnnotations())
	n.SetFinalizers(p.GetFinalizers())
	n.SetOwnerReferences(p.GetOwnerReferences())
	n.SetGeneration(p.GetGeneration())
}

func (s statusStrategy) ValidateUpdate(context.Context, runtime.Object, runtime.Object) field.ErrorList {
	return nil
}

func (s statusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return s.resets("spec")
}

func fieldOf(o runtime.Object, name string) reflect.Value {
	return reflect.ValueOf(o).Elem().FieldByName(name)
}
