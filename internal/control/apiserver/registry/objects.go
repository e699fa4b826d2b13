package registry

import (
	"context"
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/tools/cache"
)

// Objects gives the API server's own controllers access to a store: no client, no encoding, no
// user. Reads go to storage; only its source is served from the watch cache.
type Objects struct{ store *Store }

// Objects returns the store as the API server's own controllers use it.
func (s *Store) Objects() Objects { return Objects{s} }

// FinalizedObjects returns the same, but a write may remove the finalizer that Prepare keeps.
func (s *Store) FinalizedObjects() Objects {
	r, free, st := *s.Kind, *s.Store, s.UpdateStrategy.(strategy)
	r.Prepare = nil
	st.r = &r
	free.UpdateStrategy = st
	return Objects{&Store{Store: &free, Kind: &r}}
}

// Get implements gc.Store.
func (s Objects) Get(ctx context.Context, namespace, name string) (metav1.Object, error) {
	o, err := s.store.Get(genericapirequest.WithNamespace(ctx, namespace), name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return o.(metav1.Object), nil
}

// List implements gc.Store.
func (s Objects) List(ctx context.Context, namespace string) (all []metav1.Object, err error) {
	list, err := s.store.List(genericapirequest.WithNamespace(ctx, namespace), &metainternalversion.ListOptions{})
	if err != nil {
		return nil, err
	}
	err = meta.EachListItem(list, func(o runtime.Object) error {
		all = append(all, o.(metav1.Object))
		return nil
	})
	return all, err
}

// Delete implements gc.Store.
func (s Objects) Delete(ctx context.Context, o metav1.Object, policy metav1.DeletionPropagation) error {
	uid, version := o.GetUID(), o.GetResourceVersion()
	_, _, err := s.store.Store.Delete(genericapirequest.WithNamespace(ctx, o.GetNamespace()), o.GetName(), rest.ValidateAllObjectFunc,
		&metav1.DeleteOptions{PropagationPolicy: &policy, Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &version}})
	return err
}

// Edit implements gc.Store.
func (s Objects) Edit(ctx context.Context, o metav1.Object, change func(metav1.Object)) error {
	info := rest.DefaultUpdatedObjectInfo(nil, func(_ context.Context, _, old runtime.Object) (runtime.Object, error) {
		edited := old.DeepCopyObject()
		a := edited.(metav1.Object)
		if a.GetUID() != o.GetUID() || a.GetResourceVersion() != o.GetResourceVersion() {
			return nil, apierrors.NewConflict(s.store.Kind.GroupResource(), o.GetName(), errors.New("it has changed"))
		}
		change(a)
		return edited, nil
	})
	_, _, err := s.store.Store.Update(genericapirequest.WithNamespace(ctx, o.GetNamespace()), o.GetName(), info,
		rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	return err
}

// Source is that of the store.
func (s Objects) Source() cache.ListerWatcher { return s.store.Source() }
