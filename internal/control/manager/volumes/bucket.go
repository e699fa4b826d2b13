package volumes

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
)

// Bounds of what a client sends for a bucket, in bytes.
const (
	maxKey = 4 << 10
	maxCA  = 64 << 10
)

// Reasons of the node that are no fault of the request.
const (
	reasonMount   = "MountFailed"
	reasonBackend = "BackendFailed"
)

// Bucket is where the files of a volume are, with the name of a Secret or a key.
type Bucket struct {
	Endpoint, Region, Bucket, Prefix string
	SecretName                       string
	AccessKeyID, SecretAccessKey     string
	SessionToken, CA                 string
}

// source returns what the object has of it, and the data of the Secret that is to be made; nil: one exists.
func (b *Bucket) source(volume string) (*barchan.S3VolumeSource, map[string][]byte, error) {
	out := &barchan.S3VolumeSource{Endpoint: b.Endpoint, Region: b.Region, Bucket: b.Bucket, Prefix: b.Prefix, SecretName: b.SecretName}
	key := map[string][]byte{}
	for _, f := range []struct {
		field, as, value string
		most             int
		required         bool
	}{
		{"accessKeyID", barchan.KeyAccessKeyID, b.AccessKeyID, maxKey, true},
		{"secretAccessKey", barchan.KeySecretAccessKey, b.SecretAccessKey, maxKey, true},
		{"sessionToken", barchan.KeySessionToken, b.SessionToken, maxKey, false},
		{"ca", barchan.KeyCA, b.CA, maxCA, false},
	} {
		switch {
		case f.value != "" && b.SecretName != "":
			return nil, nil, apistatus.Refuse(errs.ErrInvalid, "s3.%s: not with secretName, whose Secret has it", f.field)
		case f.value == "" && f.required && b.SecretName == "":
			return nil, nil, apistatus.Refuse(errs.ErrInvalid, "s3.%s: is required without secretName", f.field)
		case len(f.value) > f.most:
			return nil, nil, apistatus.Refuse(errs.ErrInvalid, "s3.%s: must have at most %d bytes", f.field, f.most)
		case f.value != "":
			key[f.as] = []byte(f.value)
		}
	}
	if b.SecretName != "" {
		return out, nil, nil
	}
	out.SecretName = barchan.VolumeSecretName(volume)
	return out, key, nil
}

// keepKey makes the Secret of a volume, which owns it; its controller removes it with the volume.
func (s *Service) keepKey(ctx context.Context, v *barchan.Volume, key map[string][]byte) error {
	if key == nil {
		return nil
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: v.Namespace, Name: v.Spec.S3.SecretName, Labels: map[string]string{agents.LabelCreatedBy: sandboxes.CreatedBy},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(v, barchan.GroupVersion.WithKind("Volume"))},
		},
		Data: key,
	}
	err := s.Objects.Create(ctx, secret)
	switch {
	case apierrors.IsAlreadyExists(err):
		return apistatus.Refuse(errs.ErrConflict, "s3.accessKeyID: Secret %s exists, and is not this volume's; delete it, or give its name as secretName", secret.Name)
	case err != nil:
		return apistatus.From("keep the key of volume "+v.Name, err)
	}
	failpoint.Reach("volume/key")
	return nil
}

// unfinished returns a volume that an interrupted request like this one has made, whose key was not kept; nil: there is none.
func (s *Service) unfinished(ctx context.Context, v *barchan.Volume, key map[string][]byte) (*barchan.Volume, error) {
	has := &barchan.Volume{}
	err := s.Objects.Get(ctx, client.ObjectKeyFromObject(v), has)
	if err != nil || key == nil || has.DeletionTimestamp != nil || !equality.Semantic.DeepEqual(has.Spec, v.Spec) {
		return nil, client.IgnoreNotFound(err)
	}
	err = s.Objects.Get(ctx, client.ObjectKey{Namespace: v.Namespace, Name: v.Spec.S3.SecretName}, &corev1.Secret{})
	if apierrors.IsNotFound(err) {
		return has, nil
	}
	return nil, err
}

// unreachable returns why the files of a volume elsewhere cannot be reached, if that is known.
func unreachable(v *barchan.Volume, c *metav1.Condition) error {
	if v.Spec.StorageClassName == barchan.StorageLocal || c == nil || c.Status != metav1.ConditionFalse || c.Reason == barchan.ReasonWaiting {
		return nil
	}
	if c.Reason == barchan.ReasonSecret && v.Spec.S3 != nil && v.Spec.S3.SecretName == barchan.VolumeSecretName(v.Name) {
		return nil // the controller was faster
	}
	kind := errs.ErrInvalid
	if c.Reason == reasonMount || c.Reason == reasonBackend {
		kind = errs.ErrUnavailable
	}
	return errs.Public(kind, fmt.Sprintf("the volume's files cannot be reached, so it was not made: %s: %s", c.Reason, c.Message))
}
