package checkpoint

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

// sources returns the watches of checkpoints, their sources and their users, and the periodic scan.
func (r *reconciler) sources(from crcache.Cache) []source.Source {
	own := source.Kind(from, &barchan.Checkpoint{}, &handler.TypedEnqueueRequestForObject[*barchan.Checkpoint]{}, ownChanges())
	if r.Runner == nil {
		return []source.Source{own}
	}
	return []source.Source{
		own,
		controllers.Watch(from, &agents.Sandbox{}, func(ctx context.Context, old, now *agents.Sandbox, q controllers.Queue) {
			if old != nil && (now == nil || markOf(old) != markOf(now)) {
				r.changed(ctx, old, q)
			}
		}),
		controllers.Watch(from, &extensions.SandboxTemplate{}, func(ctx context.Context, old, _ *extensions.SandboxTemplate, q controllers.Queue) {
			if old != nil && old.Spec.Barchan != nil {
				r.released(ctx, old.Namespace, originOf(old.Spec.Barchan.Sandbox), q)
			}
		}),
		source.Func(func(ctx context.Context, q controllers.Queue) error {
			go r.sweeps(ctx, q) // ends with the controller's context, which outlives every reconcile
			return nil
		}),
	}
}

// ownChanges passes the changes that matter to a checkpoint itself.
func ownChanges() predicate.TypedPredicate[*barchan.Checkpoint] {
	return predicate.Or(controllers.SpecChanges[*barchan.Checkpoint](), predicate.TypedFuncs[*barchan.Checkpoint]{UpdateFunc: func(e event.TypedUpdateEvent[*barchan.Checkpoint]) bool {
		return e.ObjectOld.Annotations[barchan.AnnotationImport] != e.ObjectNew.Annotations[barchan.AnnotationImport]
	}})
}

// mark has the fields of a sandbox that matter to checkpoints.
type mark struct {
	phase   sandbox.Phase
	started bool
	origin  string // the checkpoint from which it has yet to start
}

func markOf(s *agents.Sandbox) mark { return mark{sandbox.PhaseOf(s), sandbox.Started(s), needs(s)} }

// changed enqueues the checkpoints that wait for a change of a sandbox.
func (r *reconciler) changed(ctx context.Context, s *agents.Sandbox, q controllers.Queue) {
	found, err := r.Objects.Unfinished(ctx, client.ObjectKeyFromObject(s))
	if err != nil {
		r.Log.ErrorContext(ctx, "checkpoints of a changed sandbox not found", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, err)
	}
	for i := range found {
		q.Add(controllers.RequestFor(&found[i]))
	}
	r.released(ctx, s.Namespace, needs(s), q)
}

// released enqueues a deleted checkpoint that may have lost its last user.
func (r *reconciler) released(ctx context.Context, namespace, name string, q controllers.Queue) {
	if name == "" {
		return
	}
	key := types.NamespacedName{Namespace: namespace, Name: name}
	if c, err := r.Objects.Checkpoint(ctx, key); err == nil && c.DeletionTimestamp != nil {
		q.Add(reconcile.Request{NamespacedName: key})
	}
}

// sweeps runs sweep at the start and periodically.
func (r *reconciler) sweeps(ctx context.Context, q controllers.Queue) {
	every := time.NewTicker(r.SweepEvery)
	defer every.Stop()
	for {
		r.sweep(ctx, q)
		select {
		case <-every.C:
		case <-ctx.Done():
			return
		}
	}
}

// sweep deletes data whose object the API server reports as not found, and enqueues ready checkpoints
// without data.
func (r *reconciler) sweep(ctx context.Context, q controllers.Queue) {
	kept, err := r.Runner.Checkpoints(ctx)
	if err != nil {
		if ctx.Err() == nil {
			r.Log.WarnContext(ctx, "data of checkpoints not listed", telemetry.Error, err)
		}
		return
	}
	there := map[types.UID]bool{}
	for i := range kept {
		ref := kept[i].Checkpoint
		there[ref.UID] = true
		c := &barchan.Checkpoint{}
		err := r.Client.Get(ctx, types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}, c)
		if apierrors.IsNotFound(err) || (err == nil && c.UID != ref.UID) {
			err = r.Runner.DropCheckpoint(ctx, ref)
			if err == nil {
				r.Log.InfoContext(ctx, "data of a checkpoint that is gone dropped", telemetry.Namespace, ref.Namespace, telemetry.Name, ref.Name, telemetry.UID, ref.UID)
			}
		}
		if err != nil && ctx.Err() == nil {
			r.Log.WarnContext(ctx, "data of a checkpoint not swept", telemetry.Namespace, ref.Namespace, telemetry.Name, ref.Name, telemetry.Error, err)
		}
	}
	r.recheck(ctx, q, there)
}

// recheck enqueues each ready checkpoint without data.
func (r *reconciler) recheck(ctx context.Context, q controllers.Queue, there map[types.UID]bool) {
	var all barchan.CheckpointList
	if err := r.Client.List(ctx, &all); err != nil {
		if ctx.Err() == nil {
			r.Log.WarnContext(ctx, "checkpoints not listed", telemetry.Error, err)
		}
		return
	}
	for i := range all.Items {
		if all.Items[i].Status.Phase == barchan.CheckpointReady && !there[all.Items[i].UID] {
			q.Add(controllers.RequestFor(&all.Items[i]))
		}
	}
}
