package apiserver

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver/gc"
)

const (
	firstNamespaceRetry   = 20 * time.Millisecond
	longestNamespaceRetry = 5 * time.Second
)

// controllers are what must run for deletion to keep its promises, by name.
func (m *machinery) controllers(log *slog.Logger) map[string]func(context.Context) error {
	var kinds []gc.Kind
	for _, s := range m.stores {
		if s.r.ownerless && s.r.namespaced { // events own nothing and go by themselves
			continue
		}
		kinds = append(kinds, gc.Kind{GroupKind: s.r.groupKind(), Namespaced: s.r.namespaced, Store: objects{s}, Source: objects{s}.source()})
	}
	emptier := &namespaceDeleter{m: m, log: log}
	return map[string]func(context.Context) error{"garbage collector": gc.New(kinds, log).Run, "namespace controller": emptier.run}
}

// ensureNamespaces makes the namespaces that are always there.
func (m *machinery) ensureNamespaces(ctx context.Context) error {
	ctx = genericapirequest.WithNamespace(ctx, metav1.NamespaceNone)
	for _, name := range permanentNamespaces() {
		if _, err := m.gate.namespaces.Get(ctx, name, &metav1.GetOptions{}); err == nil {
			continue // a full store would refuse even to say that it is there
		}
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		_, err := m.gate.namespaces.Create(ctx, ns, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("make namespace %s: %w", name, err)
		}
	}
	return nil
}

func permanentNamespaces() []string { return []string{metav1.NamespaceDefault, SystemNamespace} }

// namespaceDeleter deletes what is in a namespace that is to go, and then lets it go.
type namespaceDeleter struct {
	m     *machinery
	log   *slog.Logger
	queue workqueue.TypedRateLimitingInterface[string]
}

func (e *namespaceDeleter) run(ctx context.Context) error {
	e.queue = workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstNamespaceRetry, longestNamespaceRetry))
	r := cache.NewReflectorWithOptions(objects{e.m.gate.namespaces}.source(), nil, namespaceFeed{e},
		cache.ReflectorOptions{Name: "namespaces", TypeDescription: "Namespace"})
	var wg sync.WaitGroup
	wg.Go(func() { r.RunWithContext(ctx) })
	wg.Go(func() { e.work(ctx) })
	<-ctx.Done()
	e.queue.ShutDown()
	wg.Wait()
	return nil
}

func (e *namespaceDeleter) work(ctx context.Context) {
	for {
		name, shutdown := e.queue.Get()
		if shutdown {
			return
		}
		left, err := e.empty(ctx, name)
		switch {
		case err != nil && ctx.Err() == nil && !apierrors.IsConflict(err):
			e.log.WarnContext(ctx, "deletion of a namespace is retried", telemetry.Namespace, name, telemetry.Error, err)
			e.queue.AddRateLimited(name)
		case err != nil || left > 0:
			e.queue.AddRateLimited(name)
		default:
			e.queue.Forget(name)
		}
		e.queue.Done(name)
	}
}

// empty deletes what is in a namespace and says how much of it is still there.
func (e *namespaceDeleter) empty(ctx context.Context, name string) (left int, err error) {
	namespaces := objects{e.m.gate.namespaces}
	ns, err := namespaces.Get(ctx, metav1.NamespaceNone, name)
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil || ns.GetDeletionTimestamp() == nil {
		return 0, err
	}
	e.m.gate.shut(name, ns.GetUID())
	for _, s := range e.m.stores {
		if !s.r.namespaced {
			continue
		}
		n, err := objects{s}.deleteAll(ctx, name)
		if err != nil {
			return 0, fmt.Errorf("delete %s: %w", s.r.plural, err)
		}
		left += n
	}
	if left > 0 {
		return left, nil
	}
	e.log.InfoContext(ctx, "namespace deleted", telemetry.Namespace, name)
	return 0, objects{e.m.finalizing}.Edit(ctx, ns, func(o metav1.Object) {
		o.SetFinalizers(slices.DeleteFunc(o.GetFinalizers(), func(f string) bool { return f == NamespaceFinalizer }))
	})
}

// deleteAll deletes the objects in a namespace and says how many storage still has.
func (s objects) deleteAll(ctx context.Context, namespace string) (left int, err error) {
	all, err := s.List(ctx, namespace)
	if err != nil || len(all) == 0 {
		return 0, err
	}
	for _, o := range all {
		if o.GetDeletionTimestamp() != nil {
			continue
		}
		err := s.Delete(ctx, o, metav1.DeletePropagationBackground)
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return 0, err
		}
	}
	all, err = s.List(ctx, namespace)
	return len(all), err
}

// namespaceFeed has namespaces looked at that are to go; it implements cache.ReflectorStore.
type namespaceFeed struct{ e *namespaceDeleter }

// Add implements cache.ReflectorStore.
func (f namespaceFeed) Add(obj any) error { return f.Update(obj) }

// Update implements cache.ReflectorStore.
func (f namespaceFeed) Update(obj any) error {
	o, err := meta.Accessor(obj)
	if err == nil && o.GetDeletionTimestamp() != nil {
		f.e.queue.Add(o.GetName())
	}
	return err
}

// Delete implements cache.ReflectorStore.
func (f namespaceFeed) Delete(obj any) error {
	o, err := meta.Accessor(obj)
	if err == nil {
		f.e.m.gate.reopen(o.GetName(), o.GetUID())
	}
	return err
}

// Replace implements cache.ReflectorStore.
func (f namespaceFeed) Replace(list []any, _ string) error {
	for _, o := range list {
		if err := f.Update(o); err != nil {
			return err
		}
	}
	return nil
}

// Resync implements cache.ReflectorStore.
func (f namespaceFeed) Resync() error { return nil }
