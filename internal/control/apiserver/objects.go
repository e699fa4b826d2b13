package apiserver

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/tools/cache"
)

// objects is a store as our own controllers use it: no client, no encoding, no user. Reads go
// to storage itself; only the watch is served from the cache.
type objects struct{ *store }

// Get implements gc.Store.
func (s objects) Get(ctx context.Context, namespace, name string) (metav1.Object, error) {
	o, err := s.Store.Get(genericapirequest.WithNamespace(ctx, namespace), name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return meta.Accessor(o)
}

// List implements gc.Store.
func (s objects) List(ctx context.Context, namespace string) (all []metav1.Object, err error) {
	list, err := s.Store.List(genericapirequest.WithNamespace(ctx, namespace), &metainternalversion.ListOptions{})
	if err != nil {
		return nil, err
	}
	err = meta.EachListItem(list, func(o runtime.Object) error {
		a, err := meta.Accessor(o)
		all = append(all, a)
		return err
	})
	return all, err
}

// Delete implements gc.Store.
func (s objects) Delete(ctx context.Context, o metav1.Object, policy metav1.DeletionPropagation) error {
	uid, version := o.GetUID(), o.GetResourceVersion()
	_, _, err := s.Store.Delete(genericapirequest.WithNamespace(ctx, o.GetNamespace()), o.GetName(), rest.ValidateAllObjectFunc,
		&metav1.DeleteOptions{PropagationPolicy: &policy, Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &version}})
	return err
}

// Edit implements gc.Store.
func (s objects) Edit(ctx context.Context, o metav1.Object, change func(metav1.Object)) error {
	info := rest.DefaultUpdatedObjectInfo(nil, func(_ context.Context, _, old runtime.Object) (runtime.Object, error) {
		edited := old.DeepCopyObject()
		a, err := meta.Accessor(edited)
		if err != nil {
			return nil, err
		}
		if a.GetUID() != o.GetUID() || a.GetResourceVersion() != o.GetResourceVersion() {
			return nil, apierrors.NewConflict(s.r.groupResource(), o.GetName(), fmt.Errorf("it has changed"))
		}
		change(a)
		return edited, nil
	})
	_, _, err := s.Store.Update(genericapirequest.WithNamespace(ctx, o.GetNamespace()), o.GetName(), info,
		rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	return err
}

// source lists and watches all namespaces, for a reflector.
func (s objects) source() cache.ListerWatcher {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return s.Store.List(everywhere(ctx), internalOptions(&o))
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			return s.Watch(everywhere(ctx), internalOptions(&o))
		},
	}
}

func everywhere(ctx context.Context) context.Context {
	return genericapirequest.WithNamespace(ctx, metav1.NamespaceAll)
}

// internalOptions is what a reflector asks for, as a registry takes it; it selects everything.
func internalOptions(o *metav1.ListOptions) *metainternalversion.ListOptions {
	return &metainternalversion.ListOptions{
		Watch: o.Watch, AllowWatchBookmarks: o.AllowWatchBookmarks, SendInitialEvents: o.SendInitialEvents,
		ResourceVersion: o.ResourceVersion, ResourceVersionMatch: o.ResourceVersionMatch,
		TimeoutSeconds: o.TimeoutSeconds, Limit: o.Limit, Continue: o.Continue,
	}
}
