// Package kinds describes the kinds that the API server serves: Barchan's, those of
// agent-sandbox, and the few of Kubernetes that they need. A description has names, defaults,
// validation, the columns of kubectl and the fields of selectors.
//
// It stores and serves nothing, so that another API server's objects can be checked by it too.
// Rules about single fields are those of the types under api/.
package kinds

import (
	"maps"
	"strings"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Resource describes one kind. The published Go type is the internal version too: each kind has
// one version, so nothing is converted.
type Resource struct {
	GV           schema.GroupVersion
	Plural, Kind string
	ShortNames   []string
	Object, List runtime.Object // empty ones; New and NewList copy them

	Namespaced bool
	Status     bool // has a status subresource
	Generation bool // counts changes of its spec
	// TTLSeconds is the lifetime of an object; 0: until it is deleted. Objects with one are
	// not cached, not garbage collected, and may be created while the store refuses others.
	TTLSeconds uint64

	Defaults  func(runtime.Object)                          // registered in the scheme: applies to every decoded object
	Prepare   func(obj, old runtime.Object)                 // before a write; old is nil on create
	Validate  func(obj, old runtime.Object) field.ErrorList // after defaulting; old is nil on create
	Warn      func(runtime.Object) []string                 // warnings for the writer of a valid object; may be nil
	CheckName apivalidation.ValidateNameFunc                // nil: a DNS subdomain
	Scale     *Scale                                        // nil: no scale subresource

	columns []column
	fields  func(runtime.Object) fields.Set // selectable, beside metadata.name and metadata.namespace
	aliases map[string]string               // further names of fields, for selectors
}

// Scale maps a kind to its scale subresource.
type Scale struct {
	Get func(runtime.Object) autoscalingv1.Scale // spec and status only
	Set func(o runtime.Object, replicas int32)
}

// New returns an empty object.
func (r *Resource) New() runtime.Object { return r.Object.DeepCopyObject() }

// NewList returns an empty list.
func (r *Resource) NewList() runtime.Object { return r.List.DeepCopyObject() }

// GroupResource returns the group and the plural name.
func (r *Resource) GroupResource() schema.GroupResource {
	return r.GV.WithResource(r.Plural).GroupResource()
}

// GetSingularName implements rest.SingularNameProvider.
func (r *Resource) GetSingularName() string { return strings.ToLower(r.Kind) }

// Attributes returns the labels and fields that selectors can use.
func (r *Resource) Attributes(o runtime.Object) (labels.Set, fields.Set, error) {
	a, err := meta.Accessor(o)
	if err != nil {
		return nil, nil, err
	}
	set := fields.Set{"metadata.name": a.GetName()}
	if r.Namespaced {
		set["metadata.namespace"] = a.GetNamespace()
	}
	if r.fields != nil {
		maps.Copy(set, r.fields(o))
	}
	return a.GetLabels(), set, nil
}

// on adapts a function of one type to objects.
func on[T runtime.Object](f func(T)) func(runtime.Object) {
	return func(o runtime.Object) { f(o.(T)) }
}

// checked adapts a validation that ignores the old object.
func checked[T runtime.Object](f func(T) field.ErrorList) func(obj, old runtime.Object) field.ErrorList {
	return func(obj, _ runtime.Object) field.ErrorList { return f(obj.(T)) }
}

// checkedChange adapts a validation that compares with the old object, nil on create.
func checkedChange[T runtime.Object](f func(obj, old T) field.ErrorList) func(obj, old runtime.Object) field.ErrorList {
	return func(obj, old runtime.Object) field.ErrorList {
		before, _ := old.(T) // nil on create
		return f(obj.(T), before)
	}
}

func selectable[T runtime.Object](f func(T) fields.Set) func(runtime.Object) fields.Set {
	return func(o runtime.Object) fields.Set { return f(o.(T)) }
}
