package gc

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	firstNamespaceRetry   = 20 * time.Millisecond
	longestNamespaceRetry = 5 * time.Second
)

// Namespaces deletes the contents of a namespace that is being deleted, and then removes the
// finalizer that keeps it.
type Namespaces struct {
	Kind      // of namespaces; its store lets the finalizer be removed
	Finalizer string
	Contents  []Kind
	// Close ends creations in a namespace; Reopen is called when it is gone.
	Close, Reopen func(name string, uid types.UID)
	Log           *slog.Logger
}

// Run deletes until ctx is done.
func (n *Namespaces) Run(ctx context.Context) error {
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstNamespaceRetry, longestNamespaceRetry))
	put := func(ns metav1.Object) {
		if ns.GetDeletionTimestamp() != nil {
			queue.Add(ns.GetName())
		}
	}
	r := n.reflector(feed{
		put:    put,
		remove: func(ns metav1.Object) { n.Reopen(ns.GetName(), ns.GetUID()) },
		replace: func(all []metav1.Object) {
			for _, ns := range all {
				put(ns)
			}
		},
	})
	var wg sync.WaitGroup
	wg.Go(func() { r.RunWithContext(ctx) })
	wg.Go(func() {
		process(queue, func(name string) {
			left, err := n.empty(ctx, name)
			if err == nil && left == 0 {
				queue.Forget(name)
				return
			}
			if err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) {
				n.Log.WarnContext(ctx, "namespace deletion failed, retrying", telemetry.Namespace, name, telemetry.Error, err)
			}
			queue.AddRateLimited(name)
		})
	})
	<-ctx.Done()
	queue.ShutDown()
	wg.Wait()
	return nil
}

// process calls f with the items of a queue until it is shut down.
func process[T comparable](queue workqueue.TypedRateLimitingInterface[T], f func(T)) {
	for {
		item, shutdown := queue.Get()
		if shutdown {
			return
		}
		f(item)
		queue.Done(item)
	}
}

// empty deletes the contents of a namespace and returns how many objects remain.
func (n *Namespaces) empty(ctx context.Context, name string) (left int, err error) {
	ns, err := n.Store.Get(ctx, metav1.NamespaceNone, name)
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil || ns.GetDeletionTimestamp() == nil {
		return 0, err
	}
	n.Close(name, ns.GetUID())
	for _, k := range n.Contents {
		remain, err := k.deleteAll(ctx, name)
		if err != nil {
			return 0, fmt.Errorf("delete %s objects: %w", k.GroupKind, err)
		}
		left += remain
	}
	if left > 0 {
		return left, nil
	}
	n.Log.InfoContext(ctx, "namespace deleted", telemetry.Namespace, name)
	return 0, n.Store.Edit(ctx, ns, func(o metav1.Object) { dropFinalizer(o, n.Finalizer) })
}

// deleteAll deletes the objects in a namespace and returns how many storage still has.
func (k *Kind) deleteAll(ctx context.Context, namespace string) (left int, err error) {
	all, err := k.Store.List(ctx, namespace)
	if err != nil || len(all) == 0 {
		return 0, err
	}
	for _, o := range all {
		if o.GetDeletionTimestamp() != nil {
			continue
		}
		err := k.Store.Delete(ctx, o, metav1.DeletePropagationBackground)
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return 0, err
		}
	}
	all, err = k.Store.List(ctx, namespace)
	return len(all), err
}
