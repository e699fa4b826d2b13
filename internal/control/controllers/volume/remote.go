package volume

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
)

// retryOf returns how long a volume that is not ready waits. The REST API writes the Secret right after the volume.
func retryOf(v *barchan.Volume) time.Duration {
	c := meta.FindStatusCondition(v.Status.Conditions, barchan.ConditionReady)
	if ownsSecret(v) && c != nil && c.Reason == barchan.ReasonSecret && time.Since(v.CreationTimestamp.Time) < remoteEvery {
		return retryFirst
	}
	if isRemote(v) {
		return remoteEvery
	}
	return retryMost
}

// isRemote reports whether the files are elsewhere than on the node.
func isRemote(v *barchan.Volume) bool { return v.Spec.S3 != nil || v.Spec.NFS != nil }

// attach has the node mount a volume that is elsewhere, or check it, and sets the condition. What the user or the object store can mend
// is no error: it is looked at again.
func (r *reconciler) attach(ctx context.Context, v *barchan.Volume, status *barchan.VolumeStatus) error {
	at, problem, err := r.source(ctx, v)
	if err != nil {
		return err
	}
	if problem != "" {
		setReady(v, status, metav1.ConditionFalse, barchan.ReasonSecret, problem)
		return nil
	}
	err = r.Runner.Make(ctx, refOf(v), v.Spec.Capacity.Value(), at)
	refused := &volumetree.RemoteError{}
	switch {
	case errors.As(err, &refused):
		setReady(v, status, metav1.ConditionFalse, refused.Reason, refused.Message)
		return nil
	case err == nil:
		setReady(v, status, metav1.ConditionTrue, barchan.ReasonAvailable, "sandboxes can mount it")
	}
	return err
}

// source returns where a volume's files are, with the credentials, or what is wrong with their Secret.
func (r *reconciler) source(ctx context.Context, v *barchan.Volume) (at *volumetree.Remote, problem string, err error) {
	if v.Spec.NFS != nil {
		port, mountPort, err := v.Spec.NFS.Ports()
		return &volumetree.Remote{
			ReadOnly: v.Spec.ReadOnly, NFS: &volumetree.RemoteNFS{Server: v.Spec.NFS.Server, Path: v.Spec.NFS.Path, Port: port, MountPort: mountPort},
		}, "", err
	}
	s3 := v.Spec.S3
	secret := &corev1.Secret{}
	err = r.Client.Get(ctx, types.NamespacedName{Namespace: v.Namespace, Name: s3.SecretName}, secret)
	if apierrors.IsNotFound(err) {
		return nil, fmt.Sprintf("spec.s3.secretName: the namespace has no Secret %s", s3.SecretName), nil
	}
	if err != nil {
		return nil, "", fmt.Errorf("read Secret %s: %w", s3.SecretName, err)
	}
	value := func(key string) string { return strings.TrimSpace(string(secret.Data[key])) }
	for _, key := range []string{barchan.KeyAccessKeyID, barchan.KeySecretAccessKey} {
		if value(key) == "" {
			return nil, fmt.Sprintf("spec.s3.secretName: Secret %s has no %s", s3.SecretName, key), nil
		}
	}
	return &volumetree.Remote{
		Endpoint: s3.Endpoint, Region: s3.Region, Bucket: s3.Bucket, Prefix: s3.Prefix, ReadOnly: v.Spec.ReadOnly,
		AccessKeyID: value(barchan.KeyAccessKeyID), SecretAccessKey: value(barchan.KeySecretAccessKey),
		SessionToken: value(barchan.KeySessionToken), CA: value(barchan.KeyCA), CacheBytes: v.Spec.Capacity.Value(),
	}, "", nil
}

// ownsSecret reports whether the REST API keeps a volume's key.
func ownsSecret(v *barchan.Volume) bool {
	return v.Spec.S3 != nil && v.Spec.S3.SecretName == barchan.VolumeSecretName(v.Name)
}

// dropSecret removes the Secret in which the REST API kept a volume's key. One that the volume does not own stays.
func (r *reconciler) dropSecret(ctx context.Context, v *barchan.Volume) error {
	if !ownsSecret(v) {
		return nil
	}
	s := &corev1.Secret{}
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: v.Namespace, Name: v.Spec.S3.SecretName}, s)
	if err == nil && metav1.IsControlledBy(s, v) {
		err = r.Client.Delete(ctx, s, client.Preconditions{UID: &s.UID})
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove its Secret: %w", err)
	}
	return nil
}
