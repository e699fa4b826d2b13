package images

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/distribution/reference"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/authn/kubernetes"
	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd/pull"
)

// credentials returns those that the Secrets of a request have for its image; the zero value if they have none.
func (s *Store) credentials(ctx context.Context, ask *Ask) (pull.Credentials, error) {
	if ask.Namespace == "" || len(ask.Secrets) == 0 || s.cfg.Objects == nil {
		return ask.Credentials, nil
	}
	secrets := make([]corev1.Secret, 0, len(ask.Secrets))
	for _, name := range ask.Secrets {
		one, err := s.cfg.Objects.Secret(ctx, ask.Namespace, name)
		if err != nil {
			return pull.Credentials{}, fmt.Errorf("imagePullSecrets: Secret %s/%s: %w: %w", ask.Namespace, name, err, errs.ErrUnavailable)
		}
		if one == nil {
			return pull.Credentials{}, fmt.Errorf("imagePullSecrets: Secret %s/%s: not found: %w", ask.Namespace, name, errs.ErrNotFound)
		}
		if one.Type != corev1.SecretTypeDockerConfigJson && one.Type != corev1.SecretTypeDockercfg {
			return pull.Credentials{}, fmt.Errorf("imagePullSecrets: Secret %s/%s has type %q, want %s: %w", ask.Namespace, name, one.Type, corev1.SecretTypeDockerConfigJson, errs.ErrInvalid)
		}
		secrets = append(secrets, *one)
	}
	keys, err := kubernetes.NewFromPullSecrets(ctx, secrets)
	if err != nil { // its text may have parts of a Secret
		return pull.Credentials{}, fmt.Errorf("imagePullSecrets: a Secret in namespace %s has no valid Docker configuration: %w", ask.Namespace, errs.ErrInvalid)
	}
	for _, name := range namesOf(ask.Ref) {
		found, err := keys.Resolve(name)
		if err != nil {
			continue
		}
		cfg, err := found.Authorization()
		if err == nil && cfg.Username != "" && cfg.Password != "" {
			return pull.Credentials{Username: cfg.Username, Password: cfg.Password}, nil
		}
	}
	return pull.Credentials{}, nil
}

// repository is an authn.Resource.
type repository string

// String returns the repository with its registry.
func (r repository) String() string { return string(r) }

// RegistryStr returns the registry.
func (r repository) RegistryStr() string {
	host, _, _ := strings.Cut(string(r), "/")
	return host
}

// namesOf returns the repository of an image by the names that configurations have for it: Docker's own registry has several.
func namesOf(ref string) []authn.Resource {
	named, err := reference.ParseNormalizedNamed(ref)
	if err != nil {
		return nil
	}
	name := reference.TrimNamed(named).Name()
	if rest, ok := strings.CutPrefix(name, "docker.io/"); ok {
		return []authn.Resource{repository("index.docker.io/" + rest), repository(name), repository("registry-1.docker.io/" + rest)}
	}
	return []authn.Resource{repository(name)}
}

const saltBytes = 8

// grantOf returns a record that credentials are good for an image. It has neither.
func grantOf(image string, creds pull.Credentials) string {
	salt := make([]byte, saltBytes)
	_, _ = rand.Read(salt) // never fails
	text := hex.EncodeToString(salt)
	return text + ":" + digestOf(text+image, creds)
}

// granted reports whether a record is of these credentials and this image.
func granted(record, image string, creds pull.Credentials) bool {
	salt, sum, ok := strings.Cut(record, ":")
	return ok && subtle.ConstantTimeCompare([]byte(sum), []byte(digestOf(salt+image, creds))) == 1
}

func digestOf(salt string, creds pull.Credentials) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q", salt, creds.Username, creds.Password))
	return hex.EncodeToString(sum[:])
}
