package builds

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/distribution/reference"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// Types of credentials on the wire.
const (
	registryGeneral = "registry"
	registryGoogle  = "gcp"
	registryAmazon  = "aws"
)

// maxCredential bounds each field of credentials, in bytes.
const maxCredential = 64 << 10

// Registry are the credentials of an image's registry, as a client sends them.
type Registry struct {
	Type               string `json:"type"`
	Username           string `json:"username"`
	Password           string `json:"password"`
	ServiceAccountJSON string `json:"serviceAccountJson"`
}

// account returns the name and password by which a registry is reached. An error names the field, and has neither.
func (r *Registry) account() (username, password string, err error) {
	const field = "fromImageRegistry."
	refuse := func(name, format string, args ...any) error {
		return apistatus.Refuse(errs.ErrInvalid, field+name+": "+format, args...)
	}
	for name, value := range map[string]string{"username": r.Username, "password": r.Password, "serviceAccountJson": r.ServiceAccountJSON} {
		if len(value) > maxCredential {
			return "", "", refuse(name, "has more than %d bytes", maxCredential)
		}
	}
	switch r.Type {
	case registryGeneral:
		switch {
		case r.Username == "":
			return "", "", refuse("username", "is empty")
		case r.Password == "":
			return "", "", refuse("password", "is empty")
		}
		return r.Username, r.Password, nil
	case registryGoogle:
		if !json.Valid([]byte(r.ServiceAccountJSON)) {
			return "", "", refuse("serviceAccountJson", "is no key of a service account, as JSON")
		}
		return "_json_key", r.ServiceAccountJSON, nil // as Google's registries have it
	case registryAmazon:
		return "", "", refuse("type", "aws is not supported; use registry with the user AWS and the password that `aws ecr get-login-password` prints")
	default:
		return "", "", refuse("type", "%.80q is none of registry, gcp and aws", r.Type)
	}
}

// withCredentials keeps the credentials for a build's image as a Secret of its namespace, and has the build and its stages name it.
// It has them for that image's registry alone.
func (s *Service) withCredentials(ctx context.Context, b *barchan.TemplateBuild, r *Registry) error {
	if r == nil {
		return nil
	}
	username, password, err := r.account()
	if err != nil {
		return err
	}
	from := b.Spec.From
	if from.Image == "" {
		return apistatus.Refuse(errs.ErrInvalid, "fromImageRegistry: is for fromImage")
	}
	named, err := reference.ParseNormalizedNamed(from.Image)
	if err != nil {
		return apistatus.Refuse(errs.ErrInvalid, "fromImage: %.200q is not an image's name", from.Image)
	}
	text, err := json.Marshal(map[string]any{"auths": map[string]any{
		reference.Domain(named): map[string]string{"username": username, "password": password},
	}})
	if err != nil {
		return fmt.Errorf("encode credentials of build %s: %w", b.Name, err)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: b.Namespace, Name: barchan.CredentialsName(b.Name), Labels: map[string]string{barchan.LabelBuild: b.Name},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(b, barchan.GroupVersion.WithKind("TemplateBuild"))},
		},
		Type: corev1.SecretTypeDockerConfigJson, Data: map[string][]byte{corev1.DockerConfigJsonKey: text},
	}
	err = s.Objects.Create(ctx, secret)
	if apierrors.IsAlreadyExists(err) { // of an attempt that did not start the build
		have := &corev1.Secret{}
		if err = s.Objects.Get(ctx, client.ObjectKeyFromObject(secret), have); err == nil {
			if !metav1.IsControlledBy(have, b) {
				return apistatus.Refuse(errs.ErrConflict, "fromImageRegistry: Secret %s exists, and is not of this build", secret.Name)
			}
			have.Data = secret.Data
			err = s.Objects.Update(ctx, have)
		}
	}
	if err != nil {
		return apistatus.From("keep the credentials of build "+b.Name, err)
	}
	failpoint.Reach("templatebuild/credentials")
	from.ImagePullSecrets = []corev1.LocalObjectReference{{Name: secret.Name}}
	for i := range b.Spec.Stages {
		if stage := &b.Spec.Stages[i]; stage.From.Image != "" {
			stage.From.ImagePullSecrets = slices.Clone(from.ImagePullSecrets)
		}
	}
	return nil
}
