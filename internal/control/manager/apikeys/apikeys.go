// Package apikeys authenticates clients by their API keys, and creates, lists and deletes keys. It decides
// nothing about sandboxes, and stores no secret: an APIKey object holds a hash.
package apikeys

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// Limits of client input.
const (
	maxKey     = 256
	maxKeyName = 200
)

// freshFor is how long the cache may lack a key that was made here.
const freshFor = 10 * time.Second

// Objects reads and writes the API server.
type Objects interface {
	Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error
	Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
	Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error
}

// Cache reads keys from memory; a key that it lacks is an errs.ErrNotFound.
type Cache interface {
	APIKeyByHash(ctx context.Context, hash string) (*barchan.APIKey, error)
	APIKeys(ctx context.Context, namespace string) ([]barchan.APIKey, error)
	APIKeysBySSHKey(ctx context.Context, fingerprint string) ([]*barchan.APIKey, error)
}

// Store has the keys of all tenants. Its exported fields are required. It is safe for concurrent use.
type Store struct {
	Objects Objects
	Cache   Cache
	Quota   *quota.Quotas
	Log     *slog.Logger

	uses uses

	mu sync.Mutex
	// fresh holds keys made here that the cache may lack, by hash.
	fresh map[string]freshKey // +checklocks:mu
}

// freshKey names a key's object. The API server confirms each use.
type freshKey struct {
	key  types.NamespacedName
	made time.Time
}

// Identity is the sender of a request.
type Identity struct {
	// Namespace is the tenant.
	Namespace string
	// Key is the name of the key's object.
	Key string
	// Scope is what the sender may do. The zero value is barchan.ScopeAdmin.
	Scope barchan.KeyScope
	// ExpiresAt is when the key ends; nil: never.
	ExpiresAt *time.Time
}

// Key is an API key without its secret.
type Key struct {
	// ID is the object's UID, Prefix the start of the secret.
	ID, Namespace, Name, Description, Prefix string

	Scope     barchan.KeyScope
	CreatedAt time.Time
	// LastUsedAt is exact to an hour; nil: never.
	ExpiresAt, LastUsedAt *time.Time
}

var errKey = errs.Public(errs.ErrUnauthenticated, "the API key is unknown or revoked; make one with: barchan key create")

// Authenticate returns the identity of a key's holder. A failure is an errs.ErrUnauthenticated, whose text tells the holder of
// an expired key so.
func (st *Store) Authenticate(ctx context.Context, secret string) (Identity, error) {
	if secret == "" || len(secret) > maxKey {
		return Identity{}, errKey
	}
	hash := barchan.HashKey(secret)
	k, err := st.Cache.APIKeyByHash(ctx, hash)
	if errors.Is(err, errs.ErrNotFound) {
		k, err = st.freshKey(ctx, hash)
	}
	if errors.Is(err, errs.ErrNotFound) {
		return Identity{}, errKey
	}
	if err != nil {
		return Identity{}, fmt.Errorf("look up API key: %w", err)
	}
	if subtle.ConstantTimeCompare([]byte(k.Spec.SHA256), []byte(hash)) != 1 || k.DeletionTimestamp != nil {
		return Identity{}, errKey
	}
	if !valid(k) {
		return Identity{}, errs.Public(errs.ErrUnauthenticated, fmt.Sprintf("the API key expired at %s; make another with: barchan key create", k.Spec.ExpiresAt.UTC().Format(time.RFC3339)))
	}
	st.uses.note(k)
	return Identity{Namespace: k.Namespace, Key: k.Name, Scope: k.Spec.Scope.OrAdmin(), ExpiresAt: expiry(k)}, nil
}

// valid reports whether a key is neither expired nor revoked.
func valid(k *barchan.APIKey) bool {
	return k.DeletionTimestamp == nil && (k.Spec.ExpiresAt == nil || time.Now().Before(k.Spec.ExpiresAt.Time))
}

// freshKey finds a key that was made here a moment ago.
func (st *Store) freshKey(ctx context.Context, hash string) (*barchan.APIKey, error) {
	st.mu.Lock()
	fresh, ok := st.fresh[hash]
	st.mu.Unlock()
	if !ok || time.Since(fresh.made) > freshFor {
		return nil, errs.ErrNotFound
	}
	k := &barchan.APIKey{}
	if err := st.Objects.Get(ctx, fresh.key, k); err != nil {
		return nil, apistatus.From("read API key", err)
	}
	return k, nil
}

// New is a key to make.
type New struct {
	Description string
	// ExpiresAt is not later than the maker's; nil: the maker's.
	ExpiresAt *time.Time
	// Scope is one that the maker hands out; empty: the highest of those.
	Scope barchan.KeyScope
}

// Create makes a key for the tenant of maker. Only this call returns the secret.
func (st *Store) Create(ctx context.Context, maker Identity, key New) (_ Key, secret string, err error) {
	description, expires := strings.TrimSpace(key.Description), key.ExpiresAt
	if expires == nil {
		expires = maker.ExpiresAt
	}
	if key.Scope == "" && maker.Scope == barchan.ScopeManage {
		key.Scope = barchan.ScopeUse
	}
	if err := checkNew(maker, New{description, expires, key.Scope}); err != nil {
		return Key{}, "", err
	}
	secret = barchan.NewKeySecret()
	k := &barchan.APIKey{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: maker.Namespace, Name: "key-" + strings.ToLower(rand.Text()[:10]),
			Annotations: map[string]string{barchan.AnnotationCreatedAt: barchan.ExactNow()},
		},
		Spec: barchan.NewAPIKeySpec(secret, description),
	}
	k.Spec.Scope = key.Scope.OrAdmin()
	if expires != nil {
		k.Spec.ExpiresAt = new(metav1.NewTime(*expires))
	}
	if err := st.Quota.Create(ctx, st.Objects, k); err != nil {
		return Key{}, "", apistatus.From("create API key", err)
	}
	st.addFresh(k)
	st.Log.InfoContext(ctx, "API key created", telemetry.Namespace, k.Namespace, telemetry.Name, k.Name)
	return view(k), secret, nil
}

// checkNew refuses a key that maker may not make.
func checkNew(maker Identity, key New) error {
	switch {
	case key.Scope != "" && !key.Scope.Known():
		return apistatus.Refuse(errs.ErrInvalid, "scope: must be one of %v", barchan.KeyScopes())
	case !maker.Scope.Hands(key.Scope):
		return refuseScope(maker, key.Scope)
	case key.Description == "" || len(key.Description) > maxKeyName:
		return apistatus.Refuse(errs.ErrInvalid, "name: must have from 1 to %d characters", maxKeyName)
	case key.ExpiresAt != nil && !key.ExpiresAt.After(time.Now()):
		return apistatus.Refuse(errs.ErrInvalid, "expiresAt: must lie in the future")
	case maker.ExpiresAt != nil && key.ExpiresAt.After(*maker.ExpiresAt):
		return apistatus.Refuse(errs.ErrInvalid, "expiresAt: must not be later than %s, when the key ends that makes this one", maker.ExpiresAt.Format(time.RFC3339))
	}
	return nil
}

func (st *Store) addFresh(k *barchan.APIKey) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.fresh == nil {
		st.fresh = map[string]freshKey{}
	}
	maps.DeleteFunc(st.fresh, func(_ string, old freshKey) bool { return time.Since(old.made) > freshFor })
	st.fresh[k.Spec.SHA256] = freshKey{client.ObjectKeyFromObject(k), time.Now()}
}

// List returns a tenant's keys, oldest first.
func (st *Store) List(ctx context.Context, namespace string) ([]Key, error) {
	list, err := st.Cache.APIKeys(ctx, namespace)
	if err != nil {
		return nil, fmt.Errorf("list API keys: %w", err)
	}
	keys := make([]Key, 0, len(list))
	for i := range list {
		if list[i].DeletionTimestamp == nil {
			keys = append(keys, view(&list[i]))
		}
	}
	slices.SortFunc(keys, func(a, b Key) int { return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.Name, b.Name)) })
	return keys, nil
}

// refuseScope is the answer to a key that may not make, change or delete keys of a scope.
func refuseScope(maker Identity, scope barchan.KeyScope) error {
	return apistatus.Refuse(errs.ErrForbidden, "this API key has the scope %s, and keys of scope %s are made, changed and deleted by one of scope %s", maker.Scope, scope.OrAdmin(), barchan.ScopeAdmin)
}

// find returns a key that maker may change, given its ID or its object's name.
func (st *Store) find(ctx context.Context, maker Identity, id string) (*barchan.APIKey, error) {
	list, err := st.Cache.APIKeys(ctx, maker.Namespace)
	if err != nil {
		return nil, fmt.Errorf("list API keys: %w", err)
	}
	i := slices.IndexFunc(list, func(k barchan.APIKey) bool { return id != "" && (string(k.UID) == id || k.Name == id) })
	if i < 0 || list[i].DeletionTimestamp != nil {
		return nil, noKey(id)
	}
	if !maker.Scope.Hands(list[i].Spec.Scope.OrAdmin()) {
		return nil, refuseScope(maker, list[i].Spec.Scope)
	}
	return &list[i], nil
}

func noKey(id string) error { return apistatus.Refuse(errs.ErrNotFound, "API key %q not found", id) }

// Rename gives a tenant's key another description.
func (st *Store) Rename(ctx context.Context, maker Identity, id, description string) error {
	if description = strings.TrimSpace(description); description == "" || len(description) > maxKeyName {
		return apistatus.Refuse(errs.ErrInvalid, "name: must have from 1 to %d characters", maxKeyName)
	}
	cached, err := st.find(ctx, maker, id)
	if err != nil {
		return err
	}
	k := &barchan.APIKey{}
	if err = st.Objects.Get(ctx, client.ObjectKeyFromObject(cached), k); err == nil {
		if k.UID != cached.UID {
			return noKey(id)
		}
		k.Spec.Description = description
		err = st.Objects.Update(ctx, k)
	}
	if errors.Is(apistatus.Kind(err), errs.ErrNotFound) {
		return noKey(id)
	}
	if err != nil {
		return apistatus.From("rename API key", err)
	}
	return nil
}

// Delete revokes a tenant's key.
func (st *Store) Delete(ctx context.Context, maker Identity, id string) error {
	k, err := st.find(ctx, maker, id)
	if err != nil {
		return err
	}
	err = st.Objects.Delete(ctx, k, client.Preconditions{UID: &k.UID})
	if kind := apistatus.Kind(err); errors.Is(kind, errs.ErrNotFound) || errors.Is(kind, errs.ErrConflict) {
		return noKey(id)
	}
	if err != nil {
		return apistatus.From("delete API key", err)
	}
	st.Log.InfoContext(ctx, "API key deleted", telemetry.Namespace, maker.Namespace, telemetry.Name, k.Name)
	return nil
}

func view(k *barchan.APIKey) Key {
	v := Key{
		ID: string(k.UID), Namespace: k.Namespace, Name: k.Name, Scope: k.Spec.Scope.OrAdmin(),
		Description: k.Spec.Description, Prefix: k.Spec.Prefix, CreatedAt: barchan.CreatedAt(k), ExpiresAt: expiry(k),
	}
	if k.Status.LastUsedAt != nil {
		v.LastUsedAt = new(k.Status.LastUsedAt.UTC())
	}
	return v
}

func expiry(k *barchan.APIKey) *time.Time {
	if k.Spec.ExpiresAt == nil {
		return nil
	}
	return new(k.Spec.ExpiresAt.UTC())
}
