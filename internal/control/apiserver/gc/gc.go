// Package gc deletes objects whose owners are gone, as Kubernetes does: in the background, in
// the foreground (an owner stays until those dependents that block it are gone), or not at all
// (orphans lose the reference). It also deletes the contents of namespaces that are being deleted.
//
// A graph of owners and dependents, fed by watches, selects the objects to check. Nothing is
// deleted, orphaned or released before storage itself was read, and every write is
// conditional on that read. An owner of a kind that is not served here counts as present.
//
// Locks: the graph's is the only one; the queue is called under it.
package gc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	workers      = 2
	firstRetry   = 5 * time.Millisecond
	longestRetry = 30 * time.Second
)

// errAgain means that the work is not finished yet.
var errAgain = errors.New("not finished")

// Store is the storage of one kind, not a cache of it.
type Store interface {
	// Get returns an object; namespace is empty for kinds outside namespaces.
	Get(ctx context.Context, namespace, name string) (metav1.Object, error)
	// List returns all objects in a namespace.
	List(ctx context.Context, namespace string) ([]metav1.Object, error)
	// Delete deletes an object if it is still as given.
	Delete(ctx context.Context, o metav1.Object, policy metav1.DeletionPropagation) error
	// Edit changes an object if it is still as given; change works on a copy.
	Edit(ctx context.Context, o metav1.Object, change func(metav1.Object)) error
}

// Kind is one kind that may own or be owned.
type Kind struct {
	schema.GroupKind
	Namespaced bool
	Store      Store
	Source     cache.ListerWatcher // feeds the graph
}

// Collector is the garbage collector.
type Collector struct {
	kinds map[schema.GroupKind]Kind
	graph *graph
	queue workqueue.TypedRateLimitingInterface[types.UID]
	log   *slog.Logger
}

// New returns a collector for kinds.
func New(kinds []Kind, log *slog.Logger) *Collector {
	c := &Collector{kinds: map[schema.GroupKind]Kind{}, graph: newGraph(len(kinds)), log: log.With(telemetry.Component, "gc")}
	for _, k := range kinds {
		c.kinds[k.GroupKind] = k
	}
	return c
}

// Run collects until ctx is done.
func (c *Collector) Run(ctx context.Context) error {
	c.queue = workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](firstRetry, longestRetry))
	c.graph.enqueue = func(uid types.UID) { c.queue.Add(uid) }
	var wg sync.WaitGroup
	defer wg.Wait()
	defer c.queue.ShutDown()
	for _, k := range c.kinds {
		wg.Go(func() { k.reflector(c.graph.feedOf(k.GroupKind)).RunWithContext(ctx) })
	}
	select { // an incomplete graph would make every owner look absent
	case <-c.graph.complete:
	case <-ctx.Done():
		return nil
	}
	for range workers {
		wg.Go(func() {
			process(c.queue, func(uid types.UID) { c.finish(ctx, uid, c.collect(ctx, uid)) })
		})
	}
	<-ctx.Done()
	return nil
}

// finish retries a failed object; one that is gone is done.
func (c *Collector) finish(ctx context.Context, uid types.UID, err error) {
	if err == nil || apierrors.IsNotFound(err) {
		c.queue.Forget(uid)
		return
	}
	if ctx.Err() == nil && !apierrors.IsConflict(err) && !errors.Is(err, errAgain) {
		c.log.WarnContext(ctx, "garbage collection failed, retrying", telemetry.UID, uid, telemetry.Error, err)
	}
	c.queue.AddRateLimited(uid)
}

// collect does what one object, as storage has it now, requires.
func (c *Collector) collect(ctx context.Context, uid types.UID) error {
	n, ok := c.graph.get(uid)
	if !ok {
		return nil
	}
	kind := c.kinds[n.kind]
	o, err := kind.Store.Get(ctx, n.namespace, n.name)
	if err != nil {
		return err
	}
	switch {
	case o.GetUID() != uid:
		return nil // another object of that name
	case o.GetDeletionTimestamp() == nil:
		return c.deleteUnowned(ctx, kind, o)
	case has(o, metav1.FinalizerOrphanDependents):
		return c.orphan(ctx, kind, o)
	case has(o, metav1.FinalizerDeleteDependents):
		return c.foreground(ctx, kind, o)
	default:
		return nil
	}
}

// deleteUnowned deletes an object whose owners are all gone.
func (c *Collector) deleteUnowned(ctx context.Context, kind Kind, o metav1.Object) error {
	refs := o.GetOwnerReferences()
	if len(refs) == 0 {
		return nil
	}
	useless := map[types.UID]bool{} // owners that are gone, or wait for their dependents
	waiting := false
	for _, ref := range refs {
		state, err := c.owner(ctx, kind, o, ref)
		if err != nil {
			return fmt.Errorf("look up owner %s %s: %w", ref.Kind, ref.Name, err)
		}
		if state != present {
			useless[ref.UID] = true
		}
		waiting = waiting || state == waits
	}
	if slices.ContainsFunc(refs, func(r metav1.OwnerReference) bool { return !useless[r.UID] }) {
		if len(useless) == 0 {
			return nil
		}
		return kind.Store.Edit(ctx, o, func(o metav1.Object) { dropOwners(o, useless) })
	}
	policy := metav1.DeletePropagationBackground
	switch {
	case waiting && len(c.graph.dependents(o.GetUID())) > 0:
		if err := c.breakCycle(ctx, kind, o); err != nil {
			return err
		}
		policy = metav1.DeletePropagationForeground
	case has(o, metav1.FinalizerOrphanDependents):
		policy = metav1.DeletePropagationOrphan
	case has(o, metav1.FinalizerDeleteDependents):
		policy = metav1.DeletePropagationForeground
	}
	c.log.InfoContext(ctx, "object without owners deleted", telemetry.Kind, kind.String(),
		telemetry.Namespace, o.GetNamespace(), telemetry.Name, o.GetName(), telemetry.UID, o.GetUID())
	return kind.Store.Delete(ctx, o, policy)
}

// breakCycle unblocks the owners of an object that would itself wait for one of them.
func (c *Collector) breakCycle(ctx context.Context, kind Kind, o metav1.Object) error {
	for _, dep := range c.graph.dependents(o.GetUID()) {
		if !dep.deletingForeground() {
			continue
		}
		err := kind.Store.Edit(ctx, o, func(o metav1.Object) {
			refs := o.GetOwnerReferences()
			for i := range refs {
				refs[i].BlockOwnerDeletion = nil
			}
			o.SetOwnerReferences(refs)
		})
		if err != nil {
			return err
		}
		return errAgain // the object has changed
	}
	return nil
}

type ownerState int

const (
	present ownerState = iota
	absent
	waits // is being deleted in the foreground
)

// owner reads the owner that a reference names from storage.
func (c *Collector) owner(ctx context.Context, kind Kind, o metav1.Object, ref metav1.OwnerReference) (ownerState, error) {
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return present, nil //nolint:nilerr // such an owner is not served here
	}
	of, served := c.kinds[gv.WithKind(ref.Kind).GroupKind()]
	if !served || (of.Namespaced && !kind.Namespaced) {
		return present, nil
	}
	namespace := ""
	if of.Namespaced {
		namespace = o.GetNamespace()
	}
	owner, err := of.Store.Get(ctx, namespace, ref.Name)
	switch {
	case apierrors.IsNotFound(err):
		return absent, nil
	case err != nil:
		return present, err
	case owner.GetUID() != ref.UID:
		return absent, nil
	case owner.GetDeletionTimestamp() != nil && has(owner, metav1.FinalizerDeleteDependents):
		return waits, nil
	default:
		return present, nil
	}
}

// orphan removes an object from the references of its dependents, and then its finalizer.
func (c *Collector) orphan(ctx context.Context, kind Kind, o metav1.Object) error {
	gone := map[types.UID]bool{o.GetUID(): true}
	err := c.eachDependent(ctx, kind, o, func(k Kind, dep metav1.Object, _ bool) error {
		return k.Store.Edit(ctx, dep, func(o metav1.Object) { dropOwners(o, gone) })
	})
	if err != nil {
		return err
	}
	return kind.Store.Edit(ctx, o, func(o metav1.Object) { dropFinalizer(o, metav1.FinalizerOrphanDependents) })
}

// foreground removes the finalizer of an object that no dependent blocks. Until then it queues the
// dependents, which are deleted as their owner waits for them.
func (c *Collector) foreground(ctx context.Context, kind Kind, o metav1.Object) error {
	blocked := false
	for _, dep := range c.graph.dependents(o.GetUID()) {
		if dep.blocks(o.GetUID()) {
			blocked = true
			c.queue.Add(dep.uid)
		}
	}
	if blocked {
		return nil // their deletion queues this one again
	}
	err := c.eachDependent(ctx, kind, o, func(_ Kind, _ metav1.Object, blocks bool) error {
		if blocks {
			return errAgain // the graph lags behind
		}
		return nil
	})
	if err != nil {
		return err
	}
	return kind.Store.Edit(ctx, o, func(o metav1.Object) { dropFinalizer(o, metav1.FinalizerDeleteDependents) })
}

// eachDependent calls f for each object in storage that names o as owner.
func (c *Collector) eachDependent(ctx context.Context, of Kind, o metav1.Object, f func(k Kind, dep metav1.Object, blocks bool) error) error {
	for _, k := range c.kinds {
		if of.Namespaced && !k.Namespaced {
			continue
		}
		all, err := k.Store.List(ctx, o.GetNamespace())
		if err != nil {
			return fmt.Errorf("list %s: %w", k.GroupKind, err)
		}
		for _, dep := range all {
			for _, ref := range dep.GetOwnerReferences() {
				if ref.UID != o.GetUID() {
					continue
				}
				if err := f(k, dep, ptr.Deref(ref.BlockOwnerDeletion, false)); err != nil && !apierrors.IsNotFound(err) {
					return err
				}
				break
			}
		}
	}
	return nil
}
