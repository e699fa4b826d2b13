package volume

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// maxNamed bounds the sandboxes that a message names.
const maxNamed = 5

// Reconcile takes one step for a volume.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	v, err := r.Objects.Volume(ctx, req.NamespacedName)
	if errors.Is(err, errs.ErrNotFound) {
		return reconcile.Result{}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	step := r.keep
	if v.DeletionTimestamp != nil {
		step = r.remove
	}
	result, err := step(ctx, v)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) { // the cache lags
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	if err != nil {
		return result, fmt.Errorf("volume %s: %w", req, err)
	}
	return result, nil
}

// keep makes and measures a volume.
func (r *reconciler) keep(ctx context.Context, v *barchan.Volume) (reconcile.Result, error) {
	if controllerutil.AddFinalizer(v, barchan.VolumeFinalizer) {
		if err := r.Client.Update(ctx, v); err != nil {
			return reconcile.Result{}, fmt.Errorf("add finalizer: %w", err)
		}
	}
	if wants(v) {
		if err := r.admit(ctx, v); err != nil {
			return reconcile.Result{}, err
		}
	}
	if v.Status.Phase != barchan.VolumeReady {
		return reconcile.Result{RequeueAfter: retryOf(v)}, nil
	}
	users, err := r.Objects.Mounting(ctx, client.ObjectKeyFromObject(v))
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("list its sandboxes: %w", err)
	}
	status := v.Status.DeepCopy()
	status.Sandboxes = int32(len(users)) //nolint:gosec // a machine has fewer
	if isRemote(v) {
		if err := r.attach(ctx, v, status); err != nil {
			return reconcile.Result{}, err
		}
		return reconcile.Result{RequeueAfter: remoteEvery}, r.writeStatus(ctx, v, status)
	}
	wait, err := r.measure(ctx, v, status)
	if err != nil {
		return reconcile.Result{}, err
	}
	if err := r.writeStatus(ctx, v, status); err != nil || (len(users) == 0 && wait == 0) {
		return reconcile.Result{}, err
	}
	if wait == 0 {
		wait = r.pause(v)
	}
	return reconcile.Result{RequeueAfter: wait}, nil
}

// wants reports whether a volume waits for room in its namespace's quota.
func wants(v *barchan.Volume) bool {
	return v.DeletionTimestamp == nil && (v.Status.Phase != barchan.VolumeReady || v.Status.Capacity == nil || v.Spec.Capacity == nil || v.Spec.Capacity.Cmp(*v.Status.Capacity) != 0)
}

// admit takes room in the quota for a volume, or for its new capacity, and has the node make it.
func (r *reconciler) admit(ctx context.Context, v *barchan.Volume) error {
	select {
	case r.admitting <- struct{}{}:
		defer func() { <-r.admitting }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	refused, err := r.refusal(ctx, v)
	if err != nil {
		return err
	}
	status := v.Status.DeepCopy()
	status.VolumeID = sandbox.VolumeIDOf(v.UID)
	switch {
	case refused != "":
		if status.Phase != barchan.VolumeReady {
			status.Phase = barchan.VolumePending
		}
		setReady(v, status, metav1.ConditionFalse, barchan.ReasonQuota, refused)
		return r.writeStatus(ctx, v, status)
	case status.Phase != barchan.VolumeReady:
		if isRemote(v) {
			status.Phase = barchan.VolumePending
			if err := r.attach(ctx, v, status); err != nil || !meta.IsStatusConditionTrue(status.Conditions, barchan.ConditionReady) {
				return errors.Join(err, r.writeStatus(ctx, v, status))
			}
		} else if err := r.Runner.Make(ctx, refOf(v), v.Spec.Capacity.Value(), nil); err != nil {
			status.Phase = barchan.VolumePending
			setReady(v, status, metav1.ConditionFalse, barchan.ReasonWaiting, errs.Text(err))
			return errors.Join(err, r.writeStatus(ctx, v, status))
		}
		r.Log.InfoContext(ctx, "volume made", telemetry.Namespace, v.Namespace, telemetry.Name, v.Name)
	}
	status.Phase = barchan.VolumeReady
	status.Capacity = new(v.Spec.Capacity.DeepCopy())
	setReady(v, status, metav1.ConditionTrue, barchan.ReasonAvailable, "sandboxes can mount it")
	r.forget(v) // its new capacity is to be known
	return r.writeStatus(ctx, v, status)
}

// refusal returns why the quota has no room for a volume as its spec is. It reads the API server, for a cache may lag behind the last admission.
func (r *reconciler) refusal(ctx context.Context, v *barchan.Volume) (string, error) {
	limits, err := r.Quotas.Limits(ctx, v.Namespace)
	if err != nil {
		return "", err
	}
	if !limits.Volumes.Set && !limits.VolumeCapacity.Set {
		return "", nil
	}
	var list barchan.VolumeList
	if err := r.Client.List(ctx, &list, client.InNamespace(v.Namespace)); err != nil {
		return "", fmt.Errorf("list volumes of the namespace: %w", err)
	}
	count, bytes := int64(1), v.Spec.Capacity.Value()
	for i := range list.Items {
		if o := &list.Items[i]; o.UID != v.UID && o.Status.Capacity != nil {
			count++
			bytes += o.Status.Capacity.Value()
		}
	}
	if l := limits.Volumes; l.Set && count > l.Most {
		return fmt.Sprintf("namespace %s has a quota of %d volumes (%s); delete some", v.Namespace, l.Most, quota.AnnotationVolumes), nil
	}
	if l := limits.VolumeCapacity; l.Set && bytes > l.Most {
		return fmt.Sprintf("namespace %s has a quota of %s for the capacities of its volumes (%s), and they would have %s; ask for less, or delete some",
			v.Namespace, resource.NewQuantity(l.Most, resource.BinarySI), quota.AnnotationVolumeCapacity, resource.NewQuantity(bytes, resource.BinarySI)), nil
	}
	return "", nil
}

// measure measures a volume if it is time, or returns when it is.
func (r *reconciler) measure(ctx context.Context, v *barchan.Volume, status *barchan.VolumeStatus) (wait time.Duration, err error) {
	r.mu.Lock()
	last, known := r.measured[v.UID]
	r.mu.Unlock()
	if left := time.Until(last.at.Add(max(measureEvery, measureShare*last.took))); known && left > 0 {
		return left, nil
	}
	began := time.Now()
	u, err := r.Runner.Measure(ctx, refOf(v), status.Capacity.Value())
	if err != nil {
		return 0, fmt.Errorf("measure: %w", err)
	}
	r.mu.Lock()
	r.measured[v.UID] = measurement{at: time.Now(), took: time.Since(began)}
	r.mu.Unlock()
	status.Used, status.Files = resource.NewQuantity(u.Bytes, resource.BinarySI), u.Files
	full := meta.FindStatusCondition(status.Conditions, barchan.ConditionReady)
	switch over := u.Partial || u.Bytes > status.Capacity.Value(); {
	case over:
		setReady(v, status, metav1.ConditionFalse, barchan.ReasonOverCapacity, "its files take more than its capacity, or are too many or too deep; remove some by the API, or raise spec.capacity")
	case full != nil && full.Reason == barchan.ReasonOverCapacity:
		setReady(v, status, metav1.ConditionTrue, barchan.ReasonAvailable, "sandboxes can mount it")
	}
	return 0, nil
}

// pause returns how long after a measurement of a mounted volume the next one is.
func (r *reconciler) pause(v *barchan.Volume) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(measureEvery, measureShare*r.measured[v.UID].took)
}

func (r *reconciler) forget(v *barchan.Volume) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.measured, v.UID)
}

// remove removes a deleted volume when no sandbox mounts it.
func (r *reconciler) remove(ctx context.Context, v *barchan.Volume) (reconcile.Result, error) {
	if !controllerutil.ContainsFinalizer(v, barchan.VolumeFinalizer) {
		return reconcile.Result{}, nil
	}
	users, err := r.users(ctx, v)
	if err != nil {
		return reconcile.Result{}, err
	}
	if len(users) > 0 {
		return reconcile.Result{RequeueAfter: retryMost}, r.inUse(ctx, v, users)
	}
	if err := r.Runner.Remove(ctx, refOf(v)); errors.Is(err, errs.ErrConflict) {
		return reconcile.Result{RequeueAfter: retryFirst}, nil // the node has not removed a sandbox yet
	} else if err != nil {
		return reconcile.Result{}, err
	}
	if err := r.dropSecret(ctx, v); err != nil {
		return reconcile.Result{}, err
	}
	r.forget(v)
	controllerutil.RemoveFinalizer(v, barchan.VolumeFinalizer)
	if err := r.Client.Update(ctx, v); err != nil {
		return reconcile.Result{}, fmt.Errorf("remove finalizer: %w", err)
	}
	failpoint.Reach("volumeobject/released")
	r.Log.InfoContext(ctx, "volume removed", telemetry.Namespace, v.Namespace, telemetry.Name, v.Name)
	return reconcile.Result{}, nil
}

// users returns the sandboxes that mount a volume. If the cache has none, the API server decides.
func (r *reconciler) users(ctx context.Context, v *barchan.Volume) (names []string, err error) {
	cached, err := r.Objects.Mounting(ctx, client.ObjectKeyFromObject(v))
	if err != nil {
		return nil, fmt.Errorf("list its sandboxes: %w", err)
	}
	for _, s := range cached {
		names = append(names, s.Name)
	}
	if len(names) > 0 {
		return names, nil
	}
	var list agents.SandboxList
	if err := r.Client.List(ctx, &list, client.InNamespace(v.Namespace)); err != nil {
		return nil, fmt.Errorf("list its sandboxes: %w", err)
	}
	for i := range list.Items {
		for _, name := range sandbox.VolumesOf(&list.Items[i]) {
			if name == v.Name {
				names = append(names, list.Items[i].Name)
			}
		}
	}
	return names, nil
}

// inUse writes which sandboxes keep a deleted volume.
func (r *reconciler) inUse(ctx context.Context, v *barchan.Volume, users []string) error {
	status := v.Status.DeepCopy()
	status.Phase, status.Sandboxes = barchan.VolumeTerminating, int32(len(users)) //nolint:gosec // a machine has fewer
	named := strings.Join(users[:min(len(users), maxNamed)], ", ")
	if more := len(users) - maxNamed; more > 0 {
		named += fmt.Sprintf(" and %d more", more)
	}
	setReady(v, status, metav1.ConditionFalse, barchan.ReasonInUse, "it was deleted; its files are removed when these sandboxes no longer mount them: "+named)
	return r.writeStatus(ctx, v, status)
}

func setReady(v *barchan.Volume, status *barchan.VolumeStatus, is metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: barchan.ConditionReady, Status: is, Reason: reason, Message: message, ObservedGeneration: v.Generation,
	})
}

// writeStatus writes a status that differs.
func (r *reconciler) writeStatus(ctx context.Context, v *barchan.Volume, status *barchan.VolumeStatus) error {
	if apiequality.Semantic.DeepEqual(&v.Status, status) {
		return nil
	}
	v.Status = *status
	if err := r.Client.Status().Update(ctx, v); err != nil {
		return fmt.Errorf("write status: %w", err)
	}
	failpoint.Reach("volumeobject/status")
	return nil
}
