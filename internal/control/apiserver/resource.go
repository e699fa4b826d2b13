package apiserver

import (
	"maps"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// resource describes one kind as it is served and stored. The published Go type is the
// internal version too: there is one version of each, and nothing to convert.
type resource struct {
	gv         schema.GroupVersion
	plural     string
	kind       string
	shortNames []string
	newObject  func() runtime.Object
	newList    func() runtime.Object

	namespaced bool
	status     bool // has a status subresource
	generation bool // counts changes of its spec
	uncached   bool // is read from etcd, never from the watch cache
	ownerless  bool // the garbage collector need not look at it
	ttlSeconds uint64

	defaults  func(runtime.Object)                          // registered in the scheme: applies to whatever is decoded
	prepare   func(obj, old runtime.Object)                 // before a write; old is nil on create
	validate  func(obj, old runtime.Object) field.ErrorList // after defaulting; old is nil on create
	warn      func(runtime.Object) []string                 // what to tell the writer of a valid object; may be nil
	checkName apivalidation.ValidateNameFunc
	columns   []column
	fields    func(runtime.Object) fields.Set // selectable, beside metadata.name and metadata.namespace
	aliases   map[string]string               // further names of fields, for selectors
	scale     *scalable
}

// column is one column of the table that kubectl prints, after the name.
type column struct {
	metav1.TableColumnDefinition
	cell func(runtime.Object) any
}

func (r *resource) groupResource() schema.GroupResource {
	return r.gv.WithResource(r.plural).GroupResource()
}

func (r *resource) singular() string { return strings.ToLower(r.kind) }

func (r *resource) groupKind() schema.GroupKind { return r.gv.WithKind(r.kind).GroupKind() }

// attributes returns what selectors can see of an object.
func (r *resource) attributes(o runtime.Object) (labels.Set, fields.Set, error) {
	a, err := meta.Accessor(o)
	if err != nil {
		return nil, nil, err
	}
	set := fields.Set{"metadata.name": a.GetName()}
	if r.namespaced {
		set["metadata.namespace"] = a.GetNamespace()
	}
	if r.fields != nil {
		maps.Copy(set, r.fields(o))
	}
	return a.GetLabels(), set, nil
}

// object returns the two functions that make a kind's object and list.
func object[T, L any, PT interface {
	*T
	runtime.Object
}, PL interface {
	*L
	runtime.Object
}]() (newObject, newList func() runtime.Object) {
	return func() runtime.Object { return PT(new(T)) }, func() runtime.Object { return PL(new(L)) }
}

// on adapts a function of one type to objects.
func on[T runtime.Object](f func(T)) func(runtime.Object) {
	return func(o runtime.Object) { f(o.(T)) }
}

// checked adapts a validation that does not ask for the old object.
func checked[T runtime.Object](f func(T) field.ErrorList) func(obj, old runtime.Object) field.ErrorList {
	return func(obj, _ runtime.Object) field.ErrorList { return f(obj.(T)) }
}

// checkedChange adapts a validation that compares with the old object, nil on create.
func checkedChange[T any, P interface {
	*T
	runtime.Object
}](f func(obj, old P) field.ErrorList,
) func(obj, old runtime.Object) field.ErrorList {
	return func(obj, old runtime.Object) field.ErrorList {
		if old == nil {
			return f(obj.(P), nil)
		}
		return f(obj.(P), old.(P))
	}
}

func selectable[T runtime.Object](f func(T) fields.Set) func(runtime.Object) fields.Set {
	return func(o runtime.Object) fields.Set { return f(o.(T)) }
}
