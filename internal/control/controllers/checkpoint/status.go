package checkpoint

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// maxMessage is the maximum length of a condition message.
const maxMessage = 32 << 10

// setReady sets the Ready condition of a checkpoint.
func setReady(c *barchan.Checkpoint, status *barchan.CheckpointStatus, value metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: barchan.ConditionReady, Status: value, Reason: reason, ObservedGeneration: c.Generation,
		Message: strings.ToValidUTF8(message[:min(len(message), maxMessage)], ""),
	})
}

func notReady(c *barchan.Checkpoint, status *barchan.CheckpointStatus, reason, message string) {
	setReady(c, status, metav1.ConditionFalse, reason, message)
}

// wait records why a checkpoint waits.
func (r *reconciler) wait(ctx context.Context, c *barchan.Checkpoint, what string) error {
	status := c.Status.DeepCopy()
	status.Phase = barchan.CheckpointPending
	notReady(c, status, barchan.ReasonWaiting, what)
	return r.write(ctx, c, status)
}

// retry records a failure that is retried.
func (r *reconciler) retry(ctx context.Context, c *barchan.Checkpoint, why string) error {
	r.recordEvent(c, corev1.EventTypeWarning, "CaptureFailed", "Capture", why+"; it is tried again")
	return r.wait(ctx, c, why+"; it is tried again")
}

// fail records a final failure.
func (r *reconciler) fail(ctx context.Context, c *barchan.Checkpoint, why string) error {
	status := c.Status.DeepCopy()
	status.Phase = barchan.CheckpointFailed
	notReady(c, status, barchan.ReasonFailed, why)
	if err := r.write(ctx, c, status); err != nil {
		return err
	}
	r.Log.InfoContext(ctx, "checkpoint failed", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name, telemetry.Reason, why)
	r.recordEvent(c, corev1.EventTypeWarning, "Failed", "Capture", why)
	return nil
}

// inUse records why a deleted checkpoint still exists.
func (r *reconciler) inUse(ctx context.Context, c *barchan.Checkpoint, users string) error {
	status := c.Status.DeepCopy()
	value := metav1.ConditionFalse
	if status.Phase == barchan.CheckpointReady {
		value = metav1.ConditionTrue
	}
	setReady(c, status, value, barchan.ReasonInUse, users)
	return r.write(ctx, c, status)
}

// finish writes the status for the node's data.
func (r *reconciler) finish(ctx context.Context, c *barchan.Checkpoint, got sandbox.Captured) error {
	status := finished(c, got)
	if err := r.write(ctx, c, status); err != nil {
		return err
	}
	failpoint.Reach("checkpointobject/finished")
	r.recordEvent(c, corev1.EventTypeNormal, barchan.ReasonWritten, "Capture", fmt.Sprintf("%s of sandbox %s are kept, %s", contents(got), c.Spec.SandboxName, status.Size))
	return nil
}

func contents(got sandbox.Captured) string {
	if got.Memory {
		return "memory and files"
	}
	return "files"
}

// finished returns the status of a checkpoint with durable data.
func finished(c *barchan.Checkpoint, got sandbox.Captured) *barchan.CheckpointStatus {
	status := c.Status.DeepCopy()
	status.Phase, status.Content = barchan.CheckpointReady, barchan.ContentFiles
	status.Size, status.MemorySize = resource.NewQuantity(got.MemorySize+got.FilesSize, resource.BinarySI), nil
	status.Digest, status.RuntimeBuild, status.CPUFeatures = got.Digest, got.RuntimeBuild, got.CPUFeatures
	status.Runtime, status.Image = got.Runtime, got.Image
	if got.Memory {
		status.Content, status.MemorySize = barchan.ContentMemoryAndFiles, resource.NewQuantity(got.MemorySize, resource.BinarySI)
	}
	if status.Source == nil {
		status.Source = &barchan.CheckpointSource{}
	}
	if got.Node != "" {
		status.Source.Node = got.Node
	}
	now := metav1.Now().Rfc3339Copy()
	status.CompletedAt = &now
	setReady(c, status, metav1.ConditionTrue, barchan.ReasonWritten, lacks(c, got))
	return status
}

// lacks returns why requested memory is missing from a checkpoint.
func lacks(c *barchan.Checkpoint, got sandbox.Captured) string {
	switch {
	case got.Memory || c.Spec.Content == barchan.ContentFiles:
		return ""
	case got.Runtime == agents.RuntimeRunc:
		return "it holds files only: sandboxes of class runc have no memory that can be kept"
	default:
		return "it holds files only: the sandbox slept without its memory"
	}
}

// write writes a changed status, conditional on the version read.
func (r *reconciler) write(ctx context.Context, c *barchan.Checkpoint, status *barchan.CheckpointStatus) error {
	status.SnapshotID = c.SnapshotID()
	if apiequality.Semantic.DeepEqual(&c.Status, status) {
		return nil
	}
	c.Status = *status
	if err := r.Client.Status().Update(ctx, c); err != nil {
		return fmt.Errorf("write its status: %w", err)
	}
	return nil
}
