package etcd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/aes"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	// encryptionKeyFile is in the server's directory, beside etcd's own.
	encryptionKeyFile = "secrets.key"
	encryptionKeySize = 32
	// encryptedPrefix begins each encrypted value. Kubernetes reserves k8s:enc: for this.
	encryptedPrefix = "k8s:enc:aesgcm:v1:barchan:"
)

// transformer returns what a resource's values go through on their way to the embedded etcd. Secrets are
// encrypted; those that an earlier version wrote in the clear are read, and encrypted by their next write.
func (b *Backend) transformer(gr schema.GroupResource) value.Transformer {
	if b.secrets == nil || gr != corev1.Resource("secrets") {
		return identity.NewEncryptCheckTransformer()
	}
	return b.secrets
}

// openEncryption reads the key of Secrets, or makes it.
func openEncryption(path string) (value.Transformer, error) {
	key, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		key = make([]byte, encryptionKeySize)
		_, _ = rand.Read(key) // never fails
		if err := durable.WriteFile(path, key, 0o600); err != nil {
			return nil, fmt.Errorf("write the key of Secrets: %w", err)
		}
	case err != nil:
		return nil, fmt.Errorf("read the key of Secrets: %w", err)
	case len(key) != encryptionKeySize:
		return nil, fmt.Errorf("key of Secrets %s: %w: it has %d bytes, not %d; restore it from a backup", path, errs.ErrInvalid, len(key), encryptionKeySize)
	}
	gcm, err := aes.NewHKDFExtendedNonceGCMTransformer(key)
	if err != nil {
		return nil, fmt.Errorf("key of Secrets %s: %w", path, err)
	}
	return value.NewPrefixTransformers(nil,
		value.PrefixTransformer{Prefix: []byte(encryptedPrefix), Transformer: gcm},
		value.PrefixTransformer{Transformer: identity.NewEncryptCheckTransformer()}), nil
}

// checkEncryption reads the Secret that was written last, so that a lost key is an error with a remedy
// at the start, and not a storage that never becomes ready.
func (b *Backend) checkEncryption(ctx context.Context, c *clientv3.Client, path string) error {
	got, err := c.Get(ctx, b.cfg.Prefix+"/core/secrets/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortDescend), clientv3.WithLimit(1))
	if err != nil {
		return fmt.Errorf("read a Secret: %w", err)
	}
	for _, kv := range got.Kvs {
		if _, _, err := b.secrets.TransformFromStorage(ctx, kv.Value, value.DefaultContext(kv.Key)); err != nil {
			return fmt.Errorf("key of Secrets %s: %w: it does not open %s (%w); restore it from a backup", path, errs.ErrInvalid, kv.Key, err)
		}
	}
	return nil
}
