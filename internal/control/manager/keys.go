package manager

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/paging"
)

// Limits of what users send.
const (
	maxKey     = 256
	maxKeyName = 200
)

// freshFor is how long a key made here may be unknown to the cache.
const freshFor = 10 * time.Second

// freshKey names a key's object. Each use is confirmed by the API server.
type freshKey struct {
	key  types.NamespacedName
	made time.Time
}

// Identity is who makes a request.
type Identity struct {
	// Namespace is the tenant.
	Namespace string
	// Key is the name of the key's object.
	Key string
	// ExpiresAt is when the key ends; nil: never.
	ExpiresAt *time.Time
}

// Key is an API key without its secret.
type Key struct {
	// ID is the object's UID.
	ID, Namespace, Name string
	Description         string
	// Prefix is the start of the secret.
	Prefix    string
	CreatedAt time.Time
	ExpiresAt *time.Time
}

var errKey = errs.Public(errs.ErrUnauthenticated, "the API key is unknown, revoked or expired; make one with: barchan key create")

// Authenticate tells whose key it is. Every failure is the same errs.ErrUnauthenticated.
func (m *Manager) Authenticate(ctx context.Context, secret string) (Identity, error) {
	if secret == "" || len(secret) > maxKey {
		return Identity{}, errKey
	}
	hash := barchan.HashKey(secret)
	k, err := m.cache.APIKeyByHash(ctx, hash)
	if errors.Is(err, errs.ErrNotFound) {
		k, err = m.freshKey(ctx, hash)
	}
	if errors.Is(err, errs.ErrNotFound) {
		return Identity{}, errKey
	}
	if err != nil {
		return Identity{}, fmt.Errorf("look up API key: %w", err)
	}
	expired := k.Spec.ExpiresAt != nil && !time.Now().Before(k.Spec.ExpiresAt.Time)
	if subtle.ConstantTimeCompare([]byte(k.Spec.SHA256), []byte(hash)) != 1 || expired || k.DeletionTimestamp != nil {
		return Identity{}, errKey
	}
	return Identity{Namespace: k.Namespace, Key: k.Name, ExpiresAt: viewKey(k).ExpiresAt}, nil
}

// freshKey finds a key that was made here a moment ago.
func (m *Manager) freshKey(ctx context.Context, hash string) (*barchan.APIKey, error) {
	m.mu.Lock()
	fresh, ok := m.fresh[hash]
	m.mu.Unlock()
	if !ok || time.Since(fresh.made) > freshFor {
		return nil, errs.ErrNotFound
	}
	k := &barchan.APIKey{}
	if err := m.objects.Get(ctx, fresh.key, k); err != nil {
		return nil, apistatus.From("read API key", err)
	}
	return k, nil
}

// CreateKey makes a key for the tenant of another. The secret is returned this once and stored nowhere. It ends
// no later than the key that makes it: expires nil means as late as that.
func (m *Manager) CreateKey(ctx context.Context, maker Identity, description string, expires *time.Time) (_ Key, secret string, err error) {
	namespace, description := maker.Namespace, strings.TrimSpace(description)
	if expires == nil {
		expires = maker.ExpiresAt
	}
	switch {
	case description == "" || len(description) > maxKeyName:
		return Key{}, "", apistatus.Refuse(errs.ErrInvalid, "name: must have from 1 to %d characters", maxKeyName)
	case expires != nil && !expires.After(time.Now()):
		return Key{}, "", apistatus.Refuse(errs.ErrInvalid, "expiresAt: must lie in the future")
	case maker.ExpiresAt != nil && expires.After(*maker.ExpiresAt):
		return Key{}, "", apistatus.Refuse(errs.ErrInvalid, "expiresAt: must not be later than %s, when the key ends that makes this one", maker.ExpiresAt.Format(time.RFC3339))
	}
	secret = barchan.NewKeySecret()
	k := &barchan.APIKey{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: nameLike("key"), Annotations: map[string]string{barchan.AnnotationCreatedAt: exactly()},
		},
		Spec: barchan.NewAPIKeySpec(secret, description),
	}
	if expires != nil {
		at := metav1.NewTime(*expires)
		k.Spec.ExpiresAt = &at
	}
	if err := m.objects.Create(ctx, k); err != nil {
		return Key{}, "", apistatus.From("create API key", err)
	}
	m.rememberKey(k)
	m.log.InfoContext(ctx, "API key created", telemetry.Namespace, namespace, telemetry.Name, k.Name)
	return viewKey(k), secret, nil
}

func (m *Manager) rememberKey(k *barchan.APIKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for hash, old := range m.fresh {
		if time.Since(old.made) > freshFor {
			delete(m.fresh, hash)
		}
	}
	m.fresh[k.Spec.SHA256] = freshKey{client.ObjectKeyFromObject(k), time.Now()}
}

// Keys lists a tenant's keys, oldest first.
func (m *Manager) Keys(ctx context.Context, namespace string) ([]Key, error) {
	list, err := m.cache.APIKeys(ctx, namespace)
	if err != nil {
		return nil, fmt.Errorf("list API keys: %w", err)
	}
	keys := make([]Key, 0, len(list))
	for i := range list {
		if list[i].DeletionTimestamp == nil {
			keys = append(keys, viewKey(&list[i]))
		}
	}
	slices.SortFunc(keys, func(a, b Key) int {
		return paging.Cursor{Key: a.CreatedAt.UnixNano(), ID: a.Name}.Compare(paging.Cursor{Key: b.CreatedAt.UnixNano(), ID: b.Name})
	})
	return keys, nil
}

// DeleteKey revokes a tenant's key, named by its ID or by its object's name.
func (m *Manager) DeleteKey(ctx context.Context, namespace, id string) error {
	list, err := m.cache.APIKeys(ctx, namespace)
	if err != nil {
		return fmt.Errorf("list API keys: %w", err)
	}
	i := slices.IndexFunc(list, func(k barchan.APIKey) bool { return id != "" && (string(k.UID) == id || k.Name == id) })
	if i < 0 || list[i].DeletionTimestamp != nil {
		return apistatus.Refuse(errs.ErrNotFound, "API key %q not found", id)
	}
	k := &list[i]
	err = m.objects.Delete(ctx, k, client.Preconditions{UID: &k.UID})
	if kind := apistatus.Kind(err); errors.Is(kind, errs.ErrNotFound) || errors.Is(kind, errs.ErrConflict) {
		return apistatus.Refuse(errs.ErrNotFound, "API key %q not found", id)
	}
	if err != nil {
		return apistatus.From("delete API key", err)
	}
	m.log.InfoContext(ctx, "API key deleted", telemetry.Namespace, namespace, telemetry.Name, k.Name)
	return nil
}

func viewKey(k *barchan.APIKey) Key {
	v := Key{
		ID: string(k.UID), Namespace: k.Namespace, Name: k.Name,
		Description: k.Spec.Description, Prefix: k.Spec.Prefix, CreatedAt: createdAt(k),
	}
	if k.Spec.ExpiresAt != nil {
		at := k.Spec.ExpiresAt.UTC()
		v.ExpiresAt = &at
	}
	return v
}
