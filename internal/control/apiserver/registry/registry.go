// Package registry is the REST storage of the stored kinds: the generic registry of
// k8s.io/apiserver with one strategy for all, driven by the descriptions of package kinds.
//
// It serves no requests, authorizes no user and opens no etcd: it gets its storage from
// [Config.Options], and what a node can honour from [Config.Admission].
//
// Lock order: a creation holds the namespace gate's lock for reading while it writes; nothing
// else is locked under it.
package registry

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/control/apiserver/kinds"
)

// SystemNamespace holds Barchan's objects that belong to no tenant.
const SystemNamespace = "barchan-system"

// AdmissionFunc refuses what cannot be honoured of an object whose form is valid. It is called on
// create, with a nil old, and on update when the spec has changed. Each error names its field.
type AdmissionFunc func(ctx context.Context, obj, old runtime.Object) field.ErrorList

// Config holds what the storage of all kinds shares.
type Config struct {
	Scheme *kinds.Scheme
	// Options returns the storage options of a resource that codec encodes.
	Options func(gr schema.GroupResource, codec runtime.Codec, cached bool) generic.RESTOptions
	// Admission may be nil.
	Admission AdmissionFunc
	// Bound may be nil. It is called on every create and update, also of metadata alone, so it must let pass what exists.
	Bound AdmissionFunc
	// FromNode reports whether a request is the node's, which may change little of an object that exists.
	FromNode func(context.Context) bool
	// Gate refuses new objects while it is closed, but for namespaces and events. It may be nil.
	Gate *health.Gate
}

// Registry holds the stores of all kinds.
type Registry struct {
	Stores   []*Store
	gate     *namespaceGate
	contents contents
}

// New opens the storage of every resource and starts its watch cache; Destroy stops them.
func New(cfg *Config, resources []*kinds.Resource) (*Registry, error) {
	r := &Registry{gate: &namespaceGate{closing: map[string]types.UID{}}, contents: contents{namespaces: map[string]*namespaceContents{}}}
	for _, res := range resources {
		s, err := newStore(cfg, res, r.gate)
		if err != nil {
			r.Destroy()
			return nil, err
		}
		s.countInto(&r.contents)
		r.Stores = append(r.Stores, s)
	}
	r.gate.namespaces = r.Store("Namespace")
	return r, nil
}

// Store returns the store of a kind, which must be one of the registry's.
func (r *Registry) Store(kind string) *Store {
	return r.Stores[slices.IndexFunc(r.Stores, func(s *Store) bool { return s.Kind.Kind == kind })]
}

// Destroy stops the watch caches and their clients.
func (r *Registry) Destroy() {
	for _, s := range r.Stores {
		s.Destroy()
	}
}

// EnsureNamespaces makes the permanent namespaces.
func (r *Registry) EnsureNamespaces(ctx context.Context) error {
	ctx = genericapirequest.WithNamespace(ctx, metav1.NamespaceNone)
	for _, name := range permanentNamespaces() {
		if _, err := r.gate.namespaces.Get(ctx, name, &metav1.GetOptions{}); err == nil {
			continue // a full store would refuse to create it even if it exists
		}
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		_, err := r.gate.namespaces.Create(ctx, ns, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("make namespace %s: %w", name, err)
		}
	}
	return nil
}

func permanentNamespaces() []string { return []string{metav1.NamespaceDefault, SystemNamespace} }

// CloseNamespace refuses further creations in this very namespace and returns when the running
// ones have ended. A later namespace of the same name is another.
func (r *Registry) CloseNamespace(name string, uid types.UID) {
	r.gate.mu.Lock()
	defer r.gate.mu.Unlock()
	r.gate.closing[name] = uid
}

// ReopenNamespace forgets a namespace that is gone.
func (r *Registry) ReopenNamespace(name string, uid types.UID) {
	r.gate.mu.Lock()
	defer r.gate.mu.Unlock()
	if r.gate.closing[name] == uid {
		delete(r.gate.closing, name)
	}
}
