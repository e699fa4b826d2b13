package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
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

	"github.com/barchan-dev/barchan/internal/base/health"
)

// store is the REST storage of one kind.
type store struct {
	*genericregistry.Store
	r     *resource
	table tableConvertor
	gate  *namespaceGate // nil for kinds outside namespaces
	// health says whether anything new may be made.
	health *health.Gate
}

var (
	_ rest.StandardStorage      = (*store)(nil)
	_ rest.ShortNamesProvider   = (*store)(nil)
	_ rest.StorageWithReadiness = (*store)(nil)
	_ rest.Patcher              = (*statusREST)(nil)
	_ rest.ResetFieldsStrategy  = (*statusREST)(nil)
	_ rest.Patcher              = (*scaleREST)(nil)
)

// newStore builds the storage of r.
func newStore(r *resource, sch *scheme, b *backend, gate *namespaceGate, cfg *Config) (*store, error) {
	s := strategy{ObjectTyper: sch.Scheme, NameGenerator: names.SimpleNameGenerator, r: r, admit: cfg.Admission}
	gr := r.groupResource()
	table := tableConvertor{r}
	g := &genericregistry.Store{
		NewFunc: r.newObject, NewListFunc: r.newList,
		DefaultQualifiedResource:  gr,
		SingularQualifiedResource: r.gv.WithResource(r.singular()).GroupResource(),
		CreateStrategy:            s, UpdateStrategy: s, DeleteStrategy: s, ResetFieldsStrategy: s,
		TableConvertor: table,
	}
	if r.ttlSeconds > 0 {
		g.TTLFunc = func(runtime.Object, uint64, bool) (uint64, error) { return r.ttlSeconds, nil }
	}
	opts := b.forKind(gr, sch.codecs.LegacyCodec(r.gv), !r.uncached)
	if err := g.CompleteWithOptions(&generic.StoreOptions{RESTOptions: opts, AttrFunc: r.attributes}); err != nil {
		return nil, fmt.Errorf("registry of %s: %w", gr, err)
	}
	if !r.namespaced {
		gate = nil
	}
	return &store{Store: g, r: r, table: table, gate: gate, health: cfg.Gate}, nil
}

// finalizing returns the same storage without what keeps others from removing our finalizer.
func (s *store) finalizing() *store {
	r := *s.r
	r.prepare = nil
	free, st := *s.Store, s.UpdateStrategy.(strategy)
	st.r = &r
	free.UpdateStrategy = st
	return &store{Store: &free, r: &r, table: s.table}
}

// ShortNames implements rest.ShortNamesProvider.
func (s *store) ShortNames() []string { return s.r.shortNames }

// ConvertToTable implements rest.TableConvertor.
func (s *store) ConvertToTable(ctx context.Context, o, opts runtime.Object) (*metav1.Table, error) {
	return s.table.ConvertToTable(ctx, o, opts)
}

// Create makes an object. It holds the namespace open while it writes.
func (s *store) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, opts *metav1.CreateOptions) (runtime.Object, error) {
	if err := s.closed(); err != nil {
		return nil, err
	}
	leave, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	made, err := s.Store.Create(ctx, obj, validate, opts)
	return made, full(err)
}

// Update implements rest.Updater. Server-side apply creates through it.
func (s *store) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, forceAllowCreate bool, opts *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	if u, ok := genericapirequest.UserFrom(ctx); ok && u.GetName() == UserNode {
		info = rest.WrapUpdatedObjectInfo(info, s.finalizersOnly)
	}
	if !forceAllowCreate {
		o, created, err := s.Store.Update(ctx, name, info, create, update, false, opts)
		return o, created, full(err)
	}
	inside := create
	create = func(ctx context.Context, obj runtime.Object) error {
		if err := s.closed(); err != nil {
			return err
		}
		if s.gate != nil {
			if err := s.gate.check(ctx, genericapirequest.NamespaceValue(ctx)); err != nil {
				return err
			}
		}
		if inside == nil {
			return nil
		}
		return inside(ctx, obj)
	}
	leave := s.hold(ctx)
	defer leave()
	o, created, err := s.Store.Update(ctx, name, info, create, update, true, opts)
	return o, created, full(err)
}

// Delete implements rest.GracefulDeleter. Some namespaces stay for ever.
func (s *store) Delete(ctx context.Context, name string, validate rest.ValidateObjectFunc, opts *metav1.DeleteOptions) (runtime.Object, bool, error) {
	if s.isNamespaces() && slices.Contains(permanentNamespaces(), name) {
		return nil, false, apierrors.NewForbidden(s.r.groupResource(), name, errors.New("this namespace may not be deleted"))
	}
	o, now, err := s.Store.Delete(ctx, name, validate, opts)
	return o, now, full(err)
}

// DeleteCollection implements rest.CollectionDeleter. Namespaces are deleted one by one, as in
// Kubernetes.
func (s *store) DeleteCollection(ctx context.Context, validate rest.ValidateObjectFunc, opts *metav1.DeleteOptions,
	list *metainternalversion.ListOptions,
) (runtime.Object, error) {
	if s.isNamespaces() {
		return nil, apierrors.NewMethodNotSupported(s.r.groupResource(), "deletecollection")
	}
	return s.Store.DeleteCollection(ctx, validate, opts, list)
}

func (s *store) isNamespaces() bool { return s.r.groupResource() == corev1.Resource("namespaces") }

// enter holds the namespace of the request open and says whether objects may be created there.
func (s *store) enter(ctx context.Context) (leave func(), err error) {
	leave = s.hold(ctx)
	if s.gate == nil {
		return leave, nil
	}
	if err := s.gate.check(ctx, genericapirequest.NamespaceValue(ctx)); err != nil {
		leave()
		return nil, err
	}
	return leave, nil
}

func (s *store) hold(ctx context.Context) (leave func()) {
	if s.gate == nil {
		return func() {}
	}
	return s.gate.hold(genericapirequest.NamespaceValue(ctx))
}

// statusREST is the status subresource of a kind.
type statusREST struct {
	store *genericregistry.Store
	table tableConvertor
}

func newStatusREST(s *store) *statusREST {
	sub := *s.Store
	st := statusStrategy{s.UpdateStrategy.(strategy)}
	sub.UpdateStrategy, sub.ResetFieldsStrategy = st, st
	return &statusREST{store: &sub, table: s.table}
}

// New implements rest.Storage.
func (s *statusREST) New() runtime.Object { return s.store.New() }

// Destroy implements rest.Storage: the kind's own storage is what is destroyed.
func (s *statusREST) Destroy() {}

// Get implements rest.Getter.
func (s *statusREST) Get(ctx context.Context, name string, opts *metav1.GetOptions) (runtime.Object, error) {
	return s.store.Get(ctx, name, opts)
}

// Update implements rest.Updater; a subresource never creates its object.
func (s *statusREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, _ bool, opts *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	o, created, err := s.store.Update(ctx, name, info, create, update, false, opts)
	return o, created, full(err)
}

// GetResetFields implements rest.ResetFieldsStrategy.
func (s *statusREST) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return s.store.GetResetFields()
}

// ConvertToTable implements rest.TableConvertor.
func (s *statusREST) ConvertToTable(ctx context.Context, o, opts runtime.Object) (*metav1.Table, error) {
	return s.table.ConvertToTable(ctx, o, opts)
}
