package apiserver

import (
	"context"
	"reflect"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// strategy is how a resource is created, changed and deleted.
type strategy struct {
	runtime.ObjectTyper
	names.NameGenerator
	r     *resource
	admit AdmissionFunc
}

// NamespaceScoped implements the registry's strategies.
func (s strategy) NamespaceScoped() bool { return s.r.namespaced }

// AllowCreateOnUpdate implements the update strategy: a PUT never creates.
func (s strategy) AllowCreateOnUpdate(context.Context) bool { return false }

// AllowUnconditionalUpdate implements the update strategy: a PUT of our kinds names the version
// that it changes, as Kubernetes asks of what CRDs define.
func (s strategy) AllowUnconditionalUpdate(context.Context) bool { return !s.r.generation }

// WarningsOnCreate implements the create strategy.
func (s strategy) WarningsOnCreate(_ context.Context, o runtime.Object) []string {
	if s.r.warn == nil {
		return nil
	}
	return s.r.warn(o)
}

// WarningsOnUpdate implements the update strategy.
func (s strategy) WarningsOnUpdate(ctx context.Context, o, _ runtime.Object) []string {
	return s.WarningsOnCreate(ctx, o)
}

// Canonicalize implements the registry's strategies.
func (s strategy) Canonicalize(runtime.Object) {}

// PrepareForCreate implements the create strategy: users do not write status.
func (s strategy) PrepareForCreate(_ context.Context, o runtime.Object) {
	if s.r.status {
		fieldOf(o, "Status").SetZero()
	}
	if s.r.generation {
		setGeneration(o, 1)
	}
	s.complete(o, nil)
}

// PrepareForUpdate implements the update strategy: status stays, and a changed spec is counted.
func (s strategy) PrepareForUpdate(_ context.Context, o, old runtime.Object) {
	if s.r.status {
		fieldOf(o, "Status").Set(fieldOf(old, "Status"))
	}
	s.complete(o, old)
	if s.r.generation {
		g := generation(old)
		if s.changed(o, old) {
			g++
		}
		setGeneration(o, g)
	}
}

func (s strategy) complete(o, old runtime.Object) {
	if s.r.defaults != nil {
		s.r.defaults(o)
	}
	if s.r.prepare != nil {
		s.r.prepare(o, old)
	}
}

// changed reports whether an update changes what the kind's rules are about.
func (s strategy) changed(o, old runtime.Object) bool {
	if !s.r.generation {
		return true
	}
	return !apiequality.Semantic.DeepEqual(fieldOf(o, "Spec").Interface(), fieldOf(old, "Spec").Interface())
}

// Validate implements the create strategy.
func (s strategy) Validate(ctx context.Context, o runtime.Object) field.ErrorList {
	errs := s.validateName(o)
	return append(errs, s.validateRules(ctx, o, nil)...)
}

// ValidateUpdate implements the update strategy. An object whose spec did not change is not
// measured by rules that may have become stricter: it could not be deleted otherwise.
func (s strategy) ValidateUpdate(ctx context.Context, o, old runtime.Object) field.ErrorList {
	if !s.changed(o, old) {
		return nil
	}
	return s.validateRules(ctx, o, old)
}

func (s strategy) validateRules(ctx context.Context, o, old runtime.Object) (errs field.ErrorList) {
	if s.r.validate != nil {
		errs = s.r.validate(o, old)
	}
	if len(errs) == 0 && s.admit != nil {
		errs = s.admit(ctx, o, old)
	}
	return errs
}

func (s strategy) validateName(o runtime.Object) field.ErrorList {
	check := s.r.checkName
	if check == nil {
		check = apivalidation.NameIsDNSSubdomain
	}
	a, err := meta.Accessor(o)
	if err != nil {
		return field.ErrorList{field.InternalError(field.NewPath("metadata"), err)}
	}
	return apivalidation.ValidateObjectMetaAccessor(a, s.r.namespaced, check, field.NewPath("metadata"))
}

// GetResetFields implements rest.ResetFieldsStrategy: server-side apply of the object itself
// owns nothing of its status.
func (s strategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	if !s.r.status {
		return nil
	}
	return map[fieldpath.APIVersion]*fieldpath.Set{
		fieldpath.APIVersion(s.r.gv.String()): fieldpath.NewSet(fieldpath.MakePathOrDie("status")),
	}
}

// statusStrategy changes status alone.
type statusStrategy struct{ strategy }

// PrepareForUpdate implements the update strategy: everything but status stays.
func (s statusStrategy) PrepareForUpdate(_ context.Context, o, old runtime.Object) {
	fieldOf(o, "Spec").Set(fieldOf(old, "Spec"))
	n, errNew := meta.Accessor(o)
	p, errOld := meta.Accessor(old)
	if errNew != nil || errOld != nil {
		return // every kind here has metadata
	}
	n.SetLabels(p.GetLabels())
	n.SetAnnotations(p.GetAnnotations())
	n.SetFinalizers(p.GetFinalizers())
	n.SetOwnerReferences(p.GetOwnerReferences())
	n.SetGeneration(p.GetGeneration())
}

// ValidateUpdate implements the update strategy.
func (s statusStrategy) ValidateUpdate(context.Context, runtime.Object, runtime.Object) field.ErrorList {
	return nil
}

// GetResetFields implements rest.ResetFieldsStrategy.
func (s statusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return map[fieldpath.APIVersion]*fieldpath.Set{
		fieldpath.APIVersion(s.r.gv.String()): fieldpath.NewSet(fieldpath.MakePathOrDie("spec")),
	}
}

func fieldOf(o runtime.Object, name string) reflect.Value {
	return reflect.ValueOf(o).Elem().FieldByName(name)
}

func generation(o runtime.Object) int64 {
	if a, ok := o.(metav1.ObjectMetaAccessor); ok {
		return a.GetObjectMeta().GetGeneration()
	}
	return 0
}

func setGeneration(o runtime.Object, g int64) {
	if a, ok := o.(metav1.ObjectMetaAccessor); ok {
		a.GetObjectMeta().SetGeneration(g)
	}
}
