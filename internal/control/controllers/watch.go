package controllers

import (
	"context"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// Queue holds the requests of a controller.
type Queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// Watch calls changed at each event of a kind. old is nil for a new object, now for a deleted one.
func Watch[T client.Object](from crcache.Cache, kind T, changed func(ctx context.Context, old, now T, q Queue)) source.Source {
	var none T
	return source.Kind(from, kind, handler.TypedFuncs[T, reconcile.Request]{
		CreateFunc: func(ctx context.Context, e event.TypedCreateEvent[T], q Queue) { changed(ctx, none, e.Object, q) },
		UpdateFunc: func(ctx context.Context, e event.TypedUpdateEvent[T], q Queue) {
			changed(ctx, e.ObjectOld, e.ObjectNew, q)
		},
		DeleteFunc: func(ctx context.Context, e event.TypedDeleteEvent[T], q Queue) { changed(ctx, e.Object, none, q) },
	})
}

// SpecChanges passes changes by users. A controller's own status writes would cut its backoff short.
func SpecChanges[T client.Object]() predicate.TypedPredicate[T] {
	return predicate.TypedFuncs[T]{UpdateFunc: func(e event.TypedUpdateEvent[T]) bool {
		return e.ObjectOld.GetGeneration() != e.ObjectNew.GetGeneration() || e.ObjectOld.GetUID() != e.ObjectNew.GetUID() ||
			(e.ObjectOld.GetDeletionTimestamp() == nil) != (e.ObjectNew.GetDeletionTimestamp() == nil)
	}}
}

// RequestFor requests the reconcile of an object.
func RequestFor(o client.Object) reconcile.Request {
	return reconcile.Request{NamespacedName: client.ObjectKeyFromObject(o)}
}

// ReasonOf returns the message of a condition, as the reason of what it reports.
func ReasonOf(conditions []metav1.Condition, kind string) string {
	if c := meta.FindStatusCondition(conditions, kind); c != nil && c.Message != "" {
		return c.Message
	}
	return "no reason reported"
}
