package builds

import (
	"fmt"
	"maps"

	"k8s.io/apimachinery/pkg/types"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Limits of secrets, in bytes. They are in memory alone.
const (
	maxSecret       = 500 << 10
	maxSecrets      = 32
	maxBuildSecrets = 1 << 20
	maxAllSecrets   = 64 << 20
)

// CheckSecrets refuses secrets of a build that are too many, too large or without a name, as an errs.ErrInvalid. Its text has
// no secret.
func CheckSecrets(secrets map[string][]byte) error {
	total := 0
	for id, value := range secrets {
		if total += len(value); len(value) > maxSecret {
			return errs.Public(errs.ErrInvalid, fmt.Sprintf("secrets[%.80s]: has more than %d bytes", id, maxSecret))
		}
		if !barchan.ValidSecretID(id) {
			return errs.Public(errs.ErrInvalid, fmt.Sprintf("secrets[%.80q]: an ID must be letters, digits, dashes, dots and underscores, and not begin with a dash or a dot", id))
		}
	}
	if len(secrets) > maxSecrets || total > maxBuildSecrets {
		return errs.Public(errs.ErrInvalid, fmt.Sprintf("secrets: a build has at most %d, of %d bytes together", maxSecrets, maxBuildSecrets))
	}
	return nil
}

// SetSecrets keeps the secrets of a build in memory, until DropSecrets or the end of the process. Too many of all builds are an
// errs.ErrExhausted.
func (s *Store) SetSecrets(build types.UID, secrets map[string][]byte) error {
	if err := CheckSecrets(secrets); err != nil || len(secrets) == 0 {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	total := 0
	for other, has := range s.secrets {
		if other != build {
			total += sizeOf(has)
		}
	}
	if total+sizeOf(secrets) > maxAllSecrets {
		return errs.Public(errs.ErrExhausted, "there is no room for more secrets of template builds; try again when other builds have ended")
	}
	s.secrets[build] = maps.Clone(secrets)
	return nil
}

func sizeOf(secrets map[string][]byte) (n int) {
	for id, value := range secrets {
		n += len(id) + len(value)
	}
	return n
}

// Secrets returns those of a build; the caller does not change them.
func (s *Store) Secrets(build types.UID) map[string][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.secrets[build]
}

// DropSecrets forgets those of a build.
func (s *Store) DropSecrets(build types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.secrets, build)
}
