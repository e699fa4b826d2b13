package registry

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/apiserver/kinds"
)

// Store is the REST storage of one kind.
type Store struct {
	*genericregistry.Store
	Kind *kinds.Resource
	cfg  *Config
	gate *namespaceGate
}

var (
	_ rest.StandardStorage      = (*Store)(nil)
	_ rest.ShortNamesProvider   = (*Store)(nil)
	_ rest.StorageWithReadiness = (*Store)(nil)
	_ rest.Patcher              = (*statusREST)(nil)
	_ rest.ResetFieldsStrategy  = (*statusREST)(nil)
	_ rest.Patcher              = (*scaleREST)(nil)
)

func newStore(cfg *Config, r *kinds.Resource, gate *namespaceGate) (*Store, error) {
	st := strategy{ObjectTyper: cfg.Scheme.Scheme, NameGenerator: names.SimpleNameGenerator, r: r, admit: cfg.Admission, bound: cfg.Bound}
	gr := r.GroupResource()
	s := &Store{Kind: r, cfg: cfg, gate: gate}
	s.Store = &genericregistry.Store{
		NewFunc: r.New, NewListFunc: r.NewList,
		DefaultQualifiedResource:  gr,
		SingularQualifiedResource: r.GV.WithResource(r.GetSingularName()).GroupResource(),
		CreateStrategy:            st, UpdateStrategy: st, DeleteStrategy: st, ResetFieldsStrategy: st,
		TableConvertor: r, BeginCreate: s.beginCreate,
	}
	if r.TTLSeconds > 0 {
		s.TTLFunc = func(runtime.Object, uint64, bool) (uint64, error) { return r.TTLSeconds, nil }
	}
	opts := cfg.Options(gr, storageCodec(cfg.Scheme.Scheme, r.GV), r.TTLSeconds == 0)
	if err := s.CompleteWithOptions(&generic.StoreOptions{RESTOptions: opts, AttrFunc: r.Attributes}); err != nil {
		return nil, fmt.Errorf("registry of %s: %w", gr, err)
	}
	return s, nil
}

// Subresources returns the storage of the kind's subresources by name.
func (s *Store) Subresources() map[string]rest.Storage {
	subs := map[string]rest.Storage{}
	if s.Kind.Status {
		subs["status"] = newStatusREST(s)
	}
	if s.Kind.Scale != nil {
		subs["scale"] = newScaleREST(s)
	}
	return subs
}

// ShortNames implements rest.ShortNamesProvider.
func (s *Store) ShortNames() []string { return s.Kind.ShortNames }

// Create makes an object. It keeps namespaces from being closed while it writes.
func (s *Store) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, opts *metav1.CreateOptions) (runtime.Object, error) {
	defer s.gate.hold()()
	made, err := s.Store.Create(ctx, obj, validate, opts)
	return made, refusal(err)
}

// Update implements rest.Updater. Server-side apply creates through it.
func (s *Store) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, forceAllowCreate bool, opts *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	if s.cfg.FromNode(ctx) {
		info = rest.WrapUpdatedObjectInfo(info, s.nodeChanges)
	}
	if forceAllowCreate {
		defer s.gate.hold()()
	}
	o, created, err := s.Store.Update(ctx, name, info, create, update, forceAllowCreate, opts)
	return o, created, refusal(err)
}

// Delete implements rest.GracefulDeleter. Some namespaces are permanent.
func (s *Store) Delete(ctx context.Context, name string, validate rest.ValidateObjectFunc, opts *metav1.DeleteOptions) (runtime.Object, bool, error) {
	if s.isNamespaces() && slices.Contains(permanentNamespaces(), name) {
		return nil, false, apierrors.NewForbidden(s.Kind.GroupResource(), name, errors.New("this namespace may not be deleted"))
	}
	o, now, err := s.Store.Delete(ctx, name, validate, opts)
	return o, now, refusal(err)
}

// DeleteCollection implements rest.CollectionDeleter. Namespaces are deleted one by one, as in
// Kubernetes.
func (s *Store) DeleteCollection(ctx context.Context, validate rest.ValidateObjectFunc, opts *metav1.DeleteOptions,
	list *metainternalversion.ListOptions,
) (runtime.Object, error) {
	if s.isNamespaces() {
		return nil, apierrors.NewMethodNotSupported(s.Kind.GroupResource(), "deletecollection")
	}
	return s.Store.DeleteCollection(ctx, validate, opts, list)
}

func (s *Store) isNamespaces() bool { return s.Kind.GroupResource() == corev1.Resource("namespaces") }

// beginCreate refuses new objects while the health gate is closed, and in a namespace that is being
// deleted. The caller holds the namespace gate. Events and namespaces pass the health gate: events
// report the cause, and namespaces precede all else.
// +checklocksignore
func (s *Store) beginCreate(ctx context.Context, _ runtime.Object, _ *metav1.CreateOptions) (genericregistry.FinishFunc, error) {
	if err := s.cfg.Gate.Err(); err != nil && s.Kind.TTLSeconds == 0 && !s.isNamespaces() {
		text, _ := errs.PublicMessage(err)
		return nil, apierrors.NewServiceUnavailable(text)
	}
	if s.Kind.Namespaced {
		if err := s.gate.checkLocked(ctx, genericapirequest.NamespaceValue(ctx)); err != nil {
			return nil, err
		}
	}
	return func(context.Context, bool) {}, nil
}

// refusal translates the errors of an etcd that does not take a write.
func refusal(err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace):
		return apierrors.NewServiceUnavailable("the object store is full and takes no writes until something is deleted")
	case errors.Is(err, rpctypes.ErrRequestTooLarge):
		return apierrors.NewRequestEntityTooLargeError("an object may have at most 1.5 MiB")
	}
	return err
}

// nodeChanges refuses a write that changes more of an object than a node may: finalizers, and what a sandbox that
// runs leads to. Those are the end of its time, its suspension for a checkpoint, and the marks of both kinds.
func (s *Store) nodeChanges(ctx context.Context, obj, old runtime.Object) (runtime.Object, error) {
	if old == nil {
		return obj, nil
	}
	was, is := old.DeepCopyObject(), obj.DeepCopyObject()
	for _, o := range []runtime.Object{was, is} {
		a := o.(metav1.Object)
		a.SetFinalizers(nil)
		a.SetManagedFields(nil)
		a.SetResourceVersion("")
		a.SetGeneration(0)
		for _, key := range []string{pool.AnnotationBoundEnv, pool.AnnotationOwnEnv, barchan.AnnotationImport} {
			a.SetAnnotations(without(a.GetAnnotations(), key))
		}
		switch o := o.(type) {
		case *agents.Sandbox:
			o.Spec.OperatingMode, o.Spec.ShutdownTime = "", nil
			if o.Spec.Barchan != nil {
				o.Spec.Barchan.Resume = ""
			}
		case *barchan.Checkpoint:
			o.SetLabels(without(o.GetLabels(), barchan.LabelSandbox))
		}
		o.GetObjectKind().SetGroupVersionKind(s.Kind.GV.WithKind(s.Kind.Kind))
	}
	if apiequality.Semantic.DeepEqual(was, is) {
		return obj, nil
	}
	u, _ := genericapirequest.UserFrom(ctx)
	return nil, apierrors.NewForbidden(s.Kind.GroupResource(), obj.(metav1.Object).GetName(),
		fmt.Errorf("%s may not change this: it reports by the status subresource, and changes finalizers, spec.operatingMode and spec.shutdownTime", u.GetName()))
}

// without removes a key from labels or annotations. None and empty are the same.
func without(m map[string]string, key string) map[string]string {
	delete(m, key)
	if len(m) == 0 {
		return nil
	}
	return m
}

// statusREST is the status subresource of a kind.
type statusREST struct{ store *genericregistry.Store }

func newStatusREST(s *Store) *statusREST {
	sub := *s.Store
	sub.AfterUpdate = nil // status does not count
	st := statusStrategy{s.UpdateStrategy.(strategy)}
	sub.UpdateStrategy, sub.ResetFieldsStrategy = st, st
	return &statusREST{&sub}
}

func (s *statusREST) New() runtime.Object { return s.store.New() }

// Destroy implements rest.Storage; the kind's own storage is the one to destroy.
func (s *statusREST) Destroy() {}

func (s *statusREST) Get(ctx context.Context, name string, opts *metav1.GetOptions) (runtime.Object, error) {
	return s.store.Get(ctx, name, opts)
}

// Update implements rest.Updater; a subresource never creates its object.
func (s *statusREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, _ bool, opts *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	o, created, err := s.store.Update(ctx, name, info, create, update, false, opts)
	return o, created, refusal(err)
}

func (s *statusREST) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return s.store.GetResetFields()
}

func (s *statusREST) ConvertToTable(ctx context.Context, o, opts runtime.Object) (*metav1.Table, error) {
	return s.store.ConvertToTable(ctx, o, opts)
}
