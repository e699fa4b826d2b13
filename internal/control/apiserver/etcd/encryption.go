package etcd

import (
	"context"
	"fmt"
	"sync"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/aes"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/keyfile"
)

const (
	// encryptionKeyFile is in the server's directory, beside etcd's own.
	encryptionKeyFile = "secrets.key"
	encryptionKeySize = 32
	// encryptedPrefix begins each encrypted value. Kubernetes reserves k8s:enc: for this.
	encryptedPrefix = "k8s:enc:aesgcm:v1:barchan:"
)

// keyring encrypts Secrets with the first of its keys, and decrypts with any. Its file has the keys one after the other: one, or
// two during a rotation.
//
// Lock order: writes before mu.
type keyring struct {
	file keyfile.File
	// writes is held for reading by each write of a Secret, so that none uses a key that a rotation has replaced.
	writes sync.RWMutex

	mu sync.RWMutex
	// keys are those of the file; with has those of before a rotation too, which watches of older revisions need.
	keys [][]byte          // +checklocks:mu
	with value.Transformer // +checklocks:mu
}

var _ value.Transformer = (*keyring)(nil)

// openKeyring reads the keys of Secrets, or makes one.
func openKeyring(path string) (*keyring, error) {
	k := &keyring{file: keyfile.File{Path: path, What: "key of Secrets", Size: encryptionKeySize, Max: 2}}
	keys, err := k.file.Open()
	if err != nil {
		return nil, err
	}
	return k, k.use(keys, keys)
}

// use has keys be those of the file, and encrypts with the first of them; values of others are read too.
func (k *keyring) use(keys, readable [][]byte) error {
	var list []value.PrefixTransformer
	for _, key := range readable {
		gcm, err := aes.NewHKDFExtendedNonceGCMTransformer(key)
		if err != nil {
			return fmt.Errorf("key of Secrets %s: %w", k.file.Path, err)
		}
		list = append(list, value.PrefixTransformer{Prefix: []byte(encryptedPrefix), Transformer: gcm})
	}
	// Values that an earlier version wrote in the clear are read, and encrypted by their next write.
	list = append(list, value.PrefixTransformer{Transformer: identity.NewEncryptCheckTransformer()})
	k.mu.Lock()
	defer k.mu.Unlock()
	k.keys, k.with = keys, value.NewPrefixTransformers(nil, list...)
	return nil
}

func (k *keyring) current() (keys [][]byte, with value.Transformer) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.keys, k.with
}

// TransformFromStorage implements value.Transformer.
func (k *keyring) TransformFromStorage(ctx context.Context, data []byte, of value.Context) (out []byte, stale bool, err error) {
	_, with := k.current()
	return with.TransformFromStorage(ctx, data, of)
}

// TransformToStorage implements value.Transformer.
func (k *keyring) TransformToStorage(ctx context.Context, data []byte, of value.Context) (out []byte, err error) {
	_, with := k.current()
	return with.TransformToStorage(ctx, data, of)
}

// transformer returns what a resource's values go through on their way to the embedded etcd. Secrets are encrypted.
func (b *Backend) transformer(gr schema.GroupResource) value.Transformer {
	if b.secrets == nil || gr != corev1.Resource("secrets") {
		return identity.NewEncryptCheckTransformer()
	}
	return b.secrets
}

// held has each write of a Secret hold the keyring.
func (b *Backend) held(gr schema.GroupResource, st storage.Interface) storage.Interface {
	if b.secrets == nil || gr != corev1.Resource("secrets") {
		return st
	}
	return heldStorage{st, b.secrets}
}

type heldStorage struct {
	storage.Interface
	keys *keyring
}

// Create implements storage.Interface.
func (s heldStorage) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	s.keys.writes.RLock()
	defer s.keys.writes.RUnlock()
	return s.Interface.Create(ctx, key, obj, out, ttl)
}

// GuaranteedUpdate implements storage.Interface.
func (s heldStorage) GuaranteedUpdate(ctx context.Context, key string, into runtime.Object, ignoreNotFound bool, pre *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object) error {
	s.keys.writes.RLock()
	defer s.keys.writes.RUnlock()
	return s.Interface.GuaranteedUpdate(ctx, key, into, ignoreNotFound, pre, update, cached)
}

// checkEncryption reads the Secret that was written last, so that a lost key is an error with a remedy
// at the start, and not a storage that never becomes ready.
func (b *Backend) checkEncryption(ctx context.Context, c *clientv3.Client) error {
	got, err := c.Get(ctx, b.secretsPrefix(), clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortDescend), clientv3.WithLimit(1))
	if err != nil {
		return fmt.Errorf("read a Secret: %w", err)
	}
	for _, kv := range got.Kvs {
		if _, _, err := b.secrets.TransformFromStorage(ctx, kv.Value, value.DefaultContext(kv.Key)); err != nil {
			return fmt.Errorf("key of Secrets %s: %w: it does not open %s (%w); restore it from a backup", b.secrets.file.Path, errs.ErrInvalid, kv.Key, err)
		}
	}
	return nil
}

func (b *Backend) secretsPrefix() string { return b.cfg.Prefix + "/core/secrets/" }
