package etcd

import (
	"context"
	"fmt"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
)

// rotationPage is how many Secrets a rotation reads at once.
const rotationPage = 100

// RotateKey replaces the key of Secrets, and returns how many it wrote again. The file has both keys until each Secret is
// encrypted with the new one, and then the new one alone. After a crash at any point the next start, or the next call, finishes.
// An existing etcd has no such key: its operator encrypts it.
func (b *Backend) RotateKey(ctx context.Context) (written int, err error) {
	if b.secrets == nil {
		return 0, errs.Public(errs.ErrInvalid, "Secrets of an external etcd are not encrypted by this server; rotate the keys of that etcd")
	}
	if !b.rotating.CompareAndSwap(false, true) {
		return 0, errs.Public(errs.ErrConflict, "the key of Secrets is being rotated already")
	}
	defer b.rotating.Store(false)
	keys, _ := b.secrets.current()
	if len(keys) == 1 {
		if err := b.secrets.replace([][]byte{b.secrets.file.New(), keys[0]}); err != nil {
			return 0, err
		}
		failpoint.Reach("secrets/key_added")
	}
	c := b.client()
	defer func() { _ = c.Close() }()
	return b.finishRotation(ctx, c)
}

// replace writes keys to the file and encrypts with the first of them. No write of a Secret is in progress meanwhile. What was
// readable stays readable until the process ends.
func (k *keyring) replace(keys [][]byte) error {
	k.writes.Lock()
	defer k.writes.Unlock()
	if err := k.file.Write(keys...); err != nil {
		return err
	}
	readable := slices.Clone(keys)
	had, _ := k.current()
	for _, key := range had {
		if !slices.ContainsFunc(readable, func(r []byte) bool { return slices.Equal(r, key) }) {
			readable = append(readable, key)
		}
	}
	return k.use(keys, readable)
}

// finishRotation encrypts each Secret with the first key, and drops the others.
func (b *Backend) finishRotation(ctx context.Context, c *clientv3.Client) (written int, err error) {
	keys, _ := b.secrets.current()
	if len(keys) == 1 {
		return 0, nil
	}
	if written, err = b.rewriteSecrets(ctx, c); err != nil {
		return written, fmt.Errorf("encrypt Secrets with the new key: %w", err)
	}
	failpoint.Reach("secrets/rewritten")
	if err := b.secrets.replace(keys[:1]); err != nil {
		return written, err
	}
	failpoint.Reach("secrets/key_removed")
	return written, nil
}

// rewriteSecrets writes every Secret that the first key does not open. One that changes meanwhile is written by its writer,
// with the first key.
func (b *Backend) rewriteSecrets(ctx context.Context, c *clientv3.Client) (written int, err error) {
	end := clientv3.GetPrefixRangeEnd(b.secretsPrefix())
	for from := b.secretsPrefix(); ; {
		got, err := c.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(rotationPage))
		if err != nil {
			return written, err
		}
		for _, kv := range got.Kvs {
			text, stale, err := b.secrets.TransformFromStorage(ctx, kv.Value, value.DefaultContext(kv.Key))
			if err != nil {
				return written, fmt.Errorf("%s: %w", kv.Key, err)
			}
			if !stale {
				continue
			}
			sealed, err := b.secrets.TransformToStorage(ctx, text, value.DefaultContext(kv.Key))
			if err != nil {
				return written, fmt.Errorf("%s: %w", kv.Key, err)
			}
			res, err := c.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(string(kv.Key)), "=", kv.ModRevision)).Then(clientv3.OpPut(string(kv.Key), string(sealed))).Commit()
			if err != nil {
				return written, fmt.Errorf("%s: %w", kv.Key, err)
			}
			if res.Succeeded {
				written++
			}
		}
		if !got.More {
			return written, nil
		}
		from = string(got.Kvs[len(got.Kvs)-1].Key) + "\x00"
	}
}
