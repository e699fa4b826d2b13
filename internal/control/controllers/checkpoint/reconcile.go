package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// Reconcile takes one step for a checkpoint.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	c, err := r.Objects.Checkpoint(ctx, req.NamespacedName)
	if errors.Is(err, errs.ErrNotFound) {
		return reconcile.Result{}, nil // the scan removes leftover data
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	if r.elsewhere(nodeOf(c)) {
		return reconcile.Result{}, nil
	}
	result, err := r.step(ctx, c)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		// A concurrent write: reconcile again when the cache shows it.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("checkpoint %s: %w", req, err)
	}
	return result, nil
}

// elsewhere reports whether a name is that of another node.
func (r *reconciler) elsewhere(node string) bool {
	return r.Runner != nil && node != "" && node != r.Node
}

// nodeOf returns the node that has or writes the data; empty before that.
func nodeOf(c *barchan.Checkpoint) string {
	if c.Status.Source == nil {
		return ""
	}
	return c.Status.Source.Node
}

func (r *reconciler) step(ctx context.Context, c *barchan.Checkpoint) (result reconcile.Result, err error) {
	if c.DeletionTimestamp != nil {
		return r.remove(ctx, c)
	}
	switch phase := c.Status.Phase; {
	case phase == barchan.CheckpointFailed:
	case r.Runner == nil:
		err = r.fail(ctx, c, "checkpoints are not available on a Kubernetes cluster, where "+sandbox.NoMemory)
	case phase == barchan.CheckpointReady:
		err = r.verify(ctx, c)
	default:
		if c.Spec.Origin == barchan.OriginImport {
			result, err = r.await(ctx, c)
		} else {
			err = r.take(ctx, c)
		}
	}
	if err != nil {
		return result, err
	}
	end, ends := endOf(c)
	if !ends {
		return result, nil
	}
	if left := time.Until(end); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	return reconcile.Result{}, r.expire(ctx, c)
}

// endOf returns when a finished checkpoint expires.
func endOf(c *barchan.Checkpoint) (at time.Time, ends bool) {
	if c.Spec.TTLSeconds == nil {
		return time.Time{}, false
	}
	switch done := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady); {
	case c.Status.Phase == barchan.CheckpointReady && c.Status.CompletedAt != nil:
		at = c.Status.CompletedAt.Time
	case c.Status.Phase == barchan.CheckpointFailed && done != nil:
		at = done.LastTransitionTime.Time
	default:
		return time.Time{}, false
	}
	return at.Add(time.Duration(*c.Spec.TTLSeconds) * time.Second), true
}

// expire deletes an expired checkpoint.
func (r *reconciler) expire(ctx context.Context, c *barchan.Checkpoint) error {
	same := client.Preconditions{UID: &c.UID, ResourceVersion: &c.ResourceVersion}
	if err := r.Client.Delete(ctx, c, same); err != nil {
		return fmt.Errorf("delete after spec.ttlSeconds: %w", err)
	}
	r.recordEvent(c, corev1.EventTypeNormal, "Expired", "Expire", fmt.Sprintf("its spec.ttlSeconds, %d, have passed", *c.Spec.TTLSeconds))
	return nil
}

// verify checks that the node still has the data of a ready checkpoint.
func (r *reconciler) verify(ctx context.Context, c *barchan.Checkpoint) error {
	_, err := r.Runner.Captured(ctx, refOf(c))
	if errors.Is(err, errs.ErrNotFound) {
		return r.fail(ctx, c, "its data are not on the node any more; delete it, and take another")
	}
	if err != nil {
		return fmt.Errorf("query its data on the node: %w", err)
	}
	return nil
}

// await handles a checkpoint that is being imported.
func (r *reconciler) await(ctx context.Context, c *barchan.Checkpoint) (reconcile.Result, error) {
	if err := r.hold(ctx, c, ""); err != nil {
		return reconcile.Result{}, err
	}
	got, err := r.Runner.Captured(ctx, refOf(c))
	if err == nil {
		return reconcile.Result{}, r.finish(ctx, c, got)
	}
	if errors.Is(err, errs.ErrUnavailable) { // the import continues
		return reconcile.Result{RequeueAfter: r.ImportPatience}, r.wait(ctx, c, "waits for the data that are imported: "+errs.Text(err))
	}
	if !errors.Is(err, errs.ErrNotFound) {
		return reconcile.Result{}, fmt.Errorf("query imported data on the node: %w", err)
	}
	left := time.Until(c.CreationTimestamp.Add(r.ImportPatience))
	if r.abandoned(c) {
		return reconcile.Result{}, r.fail(ctx, c, "the import was interrupted by the end of the server; delete it, and import it again")
	}
	if left <= 0 {
		return reconcile.Result{}, r.fail(ctx, c, fmt.Sprintf("the import was interrupted: its data did not come within %s; delete it, and import it again", r.ImportPatience))
	}
	return reconcile.Result{RequeueAfter: left}, r.wait(ctx, c, "waits for the data that are imported")
}

// abandoned reports whether an earlier server process began the import. Without a time in the annotation it
// uses the creation time, and its resolution of a second in favor of the import.
func (r *reconciler) abandoned(c *barchan.Checkpoint) bool {
	if at, err := time.Parse(time.RFC3339Nano, c.Annotations[barchan.AnnotationImport]); err == nil {
		return at.Before(r.began)
	}
	return c.CreationTimestamp.Time.Before(r.began.Truncate(time.Second))
}

// hold adds the finalizer, which stays until the node has deleted the data, and labels the checkpoint with
// its source sandbox, if known.
func (r *reconciler) hold(ctx context.Context, c *barchan.Checkpoint, source sandbox.ID) error {
	if !controllerutil.AddFinalizer(c, barchan.NodeFinalizer) {
		return nil
	}
	if source != "" && c.Labels[barchan.LabelSandbox] == "" {
		if c.Labels == nil {
			c.Labels = map[string]string{}
		}
		c.Labels[barchan.LabelSandbox] = string(source)
	}
	if err := r.Client.Update(ctx, c); err != nil {
		return fmt.Errorf("add its finalizer: %w", err)
	}
	return nil
}

// remove deletes the data and then the finalizer.
func (r *reconciler) remove(ctx context.Context, c *barchan.Checkpoint) (reconcile.Result, error) {
	if !controllerutil.ContainsFinalizer(c, barchan.NodeFinalizer) {
		return reconcile.Result{}, nil
	}
	if r.Runner != nil { // else there are no data
		users, err := r.users(ctx, c)
		if err != nil {
			return reconcile.Result{}, err
		}
		if users != "" {
			return reconcile.Result{RequeueAfter: inUseRetry}, r.inUse(ctx, c, users)
		}
		if err := r.Runner.DropCheckpoint(ctx, refOf(c)); err != nil {
			if ctx.Err() == nil {
				r.recordEvent(c, corev1.EventTypeWarning, "RemoveFailed", "Remove", errs.Text(err))
			}
			return reconcile.Result{}, fmt.Errorf("delete its data: %w", err)
		}
	}
	failpoint.Reach("checkpointobject/dropped")
	controllerutil.RemoveFinalizer(c, barchan.NodeFinalizer)
	if err := r.Client.Update(ctx, c); err != nil {
		return reconcile.Result{}, fmt.Errorf("remove its finalizer: %w", err)
	}
	failpoint.Reach("checkpointobject/released")
	r.Log.InfoContext(ctx, "checkpoint removed", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name)
	return reconcile.Result{}, nil
}

func refOf(c *barchan.Checkpoint) sandbox.CheckpointRef {
	return sandbox.CheckpointRef{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}

// recordEvent records a Kubernetes event.
func (r *reconciler) recordEvent(c *barchan.Checkpoint, kind, reason, action, note string) {
	if r.Events != nil {
		r.Events.Eventf(c, nil, kind, reason, action, "%s", note)
	}
}
