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
	// AccessKeyID, SecretAccessKey and Region are of type aws.
	AccessKeyID     string `json:"awsAccessKeyId"`
	SecretAccessKey string `json:"awsSecretAccessKey"` //nolint:gosec // the field's name is E2B's
	Region          string `json:"awsRegion"`
}

// account returns the name and password by which a registry is reached; at begins the names of fields. An error names the field, and has neither.
func (r *Registry) account(at string) (username, password string, err error) {
	field := at + "fromImageRegistry."
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
	default:
		return "", "", refuse("type", "%.80q is none of registry, gcp and aws", r.Type)
	}
}

// dockerConfig is what a Secret of credentials has.
type dockerConfig struct {
	Auths map[string]dockerAuth `json:"auths"`
}

type dockerAuth struct {
	Username string `json:"username"`
	Password string `json:"password"` //nolint:gosec // the field's name is Docker's
}

// credentials returns those of a build's images: of the build for its whole registry, of a stage for its image alone.
func credentials(what *Instructions) (dockerConfig, error) {
	c := dockerConfig{Auths: map[string]dockerAuth{}}
	if err := c.add("", what.FromImage, what.Registry, reference.Domain); err != nil {
		return c, err
	}
	for i := range what.Stages {
		stage := &what.Stages[i]
		if err := c.add(fmt.Sprintf("stages[%d].", i), stage.FromImage, stage.Registry, reference.Named.Name); err != nil {
			return c, err
		}
	}
	return c, nil
}

// add adds the credentials of an image under a part of its name.
func (c *dockerConfig) add(at, image string, r *Registry, part func(reference.Named) string) error {
	if r == nil {
		return nil
	}
	username, password, err := r.account(at)
	if err != nil {
		return err
	}
	if image == "" {
		return apistatus.Refuse(errs.ErrInvalid, "%sfromImageRegistry: is for fromImage", at)
	}
	named, err := reference.ParseNormalizedNamed(image)
	if err != nil {
		return apistatus.Refuse(errs.ErrInvalid, "%sfromImage: %.200q is not an image's name", at, image)
	}
	auth := dockerAuth{username, password}
	if other, has := c.Auths[part(named)]; has && other != auth {
		return apistatus.Refuse(errs.ErrInvalid, "%sfromImageRegistry: differs from that of an earlier stage with the same image", at)
	}
	c.Auths[part(named)] = auth
	return nil
}

// withCredentials keeps the credentials for the images of a build and its stages as a Secret of its namespace, and has them name it.
func (s *Service) withCredentials(ctx context.Context, b *barchan.TemplateBuild, what *Instructions) error {
	if err := s.ECR.exchange(ctx, what); err != nil {
		return err
	}
	config, err := credentials(what)
	if err != nil || len(config.Auths) == 0 {
		return err
	}
	text, err := json.Marshal(config)
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
	secrets := []corev1.LocalObjectReference{{Name: secret.Name}}
	if b.Spec.From.Image != "" {
		b.Spec.From.ImagePullSecrets = secrets
	}
	for i := range b.Spec.Stages {
		if stage := &b.Spec.Stages[i]; stage.From.Image != "" {
			stage.From.ImagePullSecrets = slices.Clone(secrets)
		}
	}
	return nil
}
