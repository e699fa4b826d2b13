package peers

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/hashicorp/memberlist"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/peers/trust"
)

const (
	keyBytes = 32 // AES-256
	keyMode  = 0o600
	// maxKeys: the one in use, and one being added or removed. With at most two, the removed key is
	// always the last, and removing the last is the only removal that memberlist's ring can do without
	// a race with its readers.
	maxKeys = 2
)

// keyring holds the gossip keys, in their file and in memberlist's ring. The first is in use.
type keyring struct {
	path string // empty: the only key was given
	ring *memberlist.Keyring
	// turn serializes key changes, the file and the announcement included: memberlist's UpdateNode
	// must not be called concurrently.
	turn chan struct{}

	mu   sync.Mutex
	keys [][]byte // +checklocks:mu
}

type keyFile struct {
	Keys []string `json:"keys"`
}

// NewKey makes a gossip key for AddKey.
func NewKey() string {
	key := make([]byte, keyBytes)
	_, _ = rand.Read(key) // never fails
	return base64.StdEncoding.EncodeToString(key)
}

// KeyID returns the ID of a key, which does not reveal it. It is the same on all replicas.
func KeyID(key string) (string, error) {
	raw, err := parseKey(key)
	if err != nil {
		return "", err
	}
	return keyID(raw), nil
}

func keyID(raw []byte) string {
	sum := sha256.Sum256(append([]byte("barchan gossip key "), raw...))
	return hex.EncodeToString(sum[:8])
}

func parseKey(text string) ([]byte, error) {
	raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
	if err != nil || len(raw) != keyBytes {
		return nil, fmt.Errorf("gossip key: want %d bytes in base64: %w", keyBytes, errs.ErrInvalid)
	}
	return raw, nil
}

// openKeys reads the keys, or makes the first one, unless a key is given.
func openKeys(path string, given []byte) (*keyring, error) {
	if given != nil {
		k := &keyring{turn: make(chan struct{}, 1), keys: [][]byte{given}}
		return k, k.makeRing()
	}
	k := &keyring{path: path, turn: make(chan struct{}, 1)}
	err := trust.Exclusively(path+".lock", func() error {
		keys, err := readKeys(path)
		if errors.Is(err, fs.ErrNotExist) {
			raw, _ := parseKey(NewKey())
			keys = [][]byte{raw}
			err = writeKeys(path, keys)
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		k.keys = keys
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("peers: %w", err)
	}
	return k, k.makeRing()
}

func (k *keyring) makeRing() (err error) {
	keys := k.all()
	if k.ring, err = memberlist.NewKeyring(keys, keys[0]); err != nil {
		return fmt.Errorf("peers: make ring of keys: %w", err)
	}
	return nil
}

func readKeys(path string) ([][]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read gossip keys: %w", err)
	}
	var f keyFile
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, fmt.Errorf("gossip keys in %s cannot be read: %w", path, errs.ErrInvalid) // the cause may quote a key
	}
	if len(f.Keys) == 0 || len(f.Keys) > maxKeys {
		return nil, fmt.Errorf("%s has %d gossip keys, want 1 or %d: %w", path, len(f.Keys), maxKeys, errs.ErrInvalid)
	}
	var keys [][]byte
	for _, text := range f.Keys {
		raw, err := parseKey(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		keys = append(keys, raw)
	}
	return keys, nil
}

func writeKeys(path string, keys [][]byte) error {
	var f keyFile
	for _, raw := range keys {
		f.Keys = append(f.Keys, base64.StdEncoding.EncodeToString(raw))
	}
	text, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("encode gossip keys: %w", err)
	}
	return durable.WriteFile(path, append(text, '\n'), keyMode)
}

func (k *keyring) all() [][]byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.keys
}

// ids returns the IDs of the keys, the one in use first.
func (k *keyring) ids() []string {
	var ids []string
	for _, raw := range k.all() {
		ids = append(ids, keyID(raw))
	}
	return ids
}

// change replaces the keys in the file first, then in the ring by apply. The caller holds turn.
func (k *keyring) change(next func(now [][]byte) ([][]byte, error), apply func() error) error {
	now := k.all()
	keys, err := next(now)
	if err != nil || slices.EqualFunc(keys, now, slices.Equal[[]byte]) {
		return err
	}
	if k.path == "" {
		return errs.Public(errs.ErrInvalid, "the gossip key derives from tokenSecret, and changes with that alone")
	}
	if err := writeKeys(k.path, keys); err != nil {
		return err
	}
	if err := apply(); err != nil {
		return fmt.Errorf("change ring of keys: %w", err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.keys = keys
	return nil
}

func find(keys [][]byte, id string) int {
	return slices.IndexFunc(keys, func(raw []byte) bool { return keyID(raw) == id })
}

// Keys returns the IDs of this replica's gossip keys, the one in use first.
//
// A key is rotated without interruption in three rounds, each over all replicas before the next
// begins: AddKey, UseKey, RemoveKey. Each is idempotent and persistent. The second and the third fail
// with errs.ErrConflict, naming the member, while one is not ready for it. A given key (Config.Key) stays the only one:
// AddKey fails with errs.ErrInvalid.
func (r *Replica) Keys() []string { return r.keys.ids() }

// AddKey lets this replica decrypt with a key. It holds two at most.
func (r *Replica) AddKey(ctx context.Context, key string) error {
	raw, err := parseKey(key)
	if err != nil {
		return err
	}
	return r.changeKeys(ctx, func(now [][]byte) ([][]byte, error) {
		if find(now, keyID(raw)) >= 0 {
			return now, nil
		}
		if len(now) >= maxKeys {
			return nil, fmt.Errorf("add gossip key: %d are held already, remove the old one first: %w", len(now), errs.ErrConflict)
		}
		return append(slices.Clone(now), raw), nil
	}, func() error { return r.keys.ring.AddKey(raw) })
}

// UseKey makes this replica encrypt with a key, by its ID, that it and all members hold.
func (r *Replica) UseKey(ctx context.Context, id string) error {
	var raw []byte
	return r.changeKeys(ctx, func(now [][]byte) ([][]byte, error) {
		at := find(now, id)
		if at < 0 {
			return nil, fmt.Errorf("use gossip key %.20q: not held: %w", id, errs.ErrNotFound)
		}
		for _, m := range r.Members() {
			if !slices.Contains(m.Keys, id) {
				return nil, fmt.Errorf("use gossip key %s: %s does not hold it yet: %w", id, m.Name, errs.ErrConflict)
			}
		}
		raw = now[at]
		return append([][]byte{raw}, slices.Delete(slices.Clone(now), at, at+1)...), nil
	}, func() error { return r.keys.ring.UseKey(raw) })
}

// RemoveKey removes a key that neither this replica nor a member encrypts with. An unknown key is
// success.
func (r *Replica) RemoveKey(ctx context.Context, id string) error {
	var raw []byte
	return r.changeKeys(ctx, func(now [][]byte) ([][]byte, error) {
		at := find(now, id)
		if at < 0 {
			return now, nil
		}
		if at == 0 {
			return nil, fmt.Errorf("remove gossip key %s: it is in use: %w", id, errs.ErrConflict)
		}
		for _, m := range r.Members() {
			if len(m.Keys) == 0 || m.Keys[0] == id {
				return nil, fmt.Errorf("remove gossip key %s: %s still uses it: %w", id, m.Name, errs.ErrConflict)
			}
		}
		raw = now[at]
		return slices.Delete(slices.Clone(now), at, at+1), nil
	}, func() error { return r.keys.ring.RemoveKey(raw) })
}

func (r *Replica) changeKeys(ctx context.Context, next func([][]byte) ([][]byte, error), apply func() error) error {
	select {
	case r.keys.turn <- struct{}{}:
		defer func() { <-r.keys.turn }()
	case <-ctx.Done():
		return fmt.Errorf("wait for another change of keys: %w", ctx.Err())
	}
	if err := r.keys.change(next, apply); err != nil {
		return err
	}
	if list := r.gossip.Load(); list != nil {
		if err := list.UpdateNode(announceTimeout); err != nil { // gossip continues to spread it
			r.log.InfoContext(ctx, "members do not know the change of keys yet", telemetry.Error, err)
		}
	}
	return nil
}
