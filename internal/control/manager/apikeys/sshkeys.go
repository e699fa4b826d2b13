package apikeys

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// SSHKey is a public key that opens sandboxes of a namespace over SSH.
type SSHKey struct {
	// Fingerprint as ssh-keygen prints it, and the comment of the key's line.
	Fingerprint, Comment string
	// Line is the key as in authorized_keys.
	Line string
}

// SSHNamespaces returns the namespaces whose sandboxes the holder of an SSH key may enter: those of the valid API keys that have
// it. None for an unknown key.
func (st *Store) SSHNamespaces(ctx context.Context, fingerprint string) ([]string, error) {
	found, err := st.Cache.APIKeysBySSHKey(ctx, fingerprint)
	if err != nil {
		return nil, fmt.Errorf("look up SSH key: %w", err)
	}
	var namespaces []string
	for _, k := range found {
		if valid(k) && !slices.Contains(namespaces, k.Namespace) {
			namespaces = append(namespaces, k.Namespace)
		}
	}
	return namespaces, nil
}

// ListSSHKeys returns those of an API key.
func (st *Store) ListSSHKeys(ctx context.Context, who Identity) ([]SSHKey, error) {
	k, err := st.holder(ctx, who)
	if err != nil {
		return nil, err
	}
	list := make([]SSHKey, 0, len(k.Spec.SSHKeys))
	for _, line := range k.Spec.SSHKeys {
		list = append(list, sshKey(line))
	}
	return list, nil
}

// AddSSHKey adds a public key to an API key; one that is there already gets the new comment.
func (st *Store) AddSSHKey(ctx context.Context, who Identity, line string) (SSHKey, error) {
	line = strings.TrimSpace(line)
	fingerprint, err := barchan.SSHFingerprint(line)
	if err != nil {
		return SSHKey{}, apistatus.Refuse(errs.ErrInvalid, "publicKey: %v", err)
	}
	err = st.changeSSHKeys(ctx, who, func(lines []string) ([]string, error) {
		i := slices.IndexFunc(lines, func(l string) bool { return sshKey(l).Fingerprint == fingerprint })
		switch {
		case i >= 0:
			lines[i] = line
		case len(lines) >= barchan.MaxSSHKeys:
			return nil, apistatus.Refuse(errs.ErrExhausted, "this API key has %d SSH keys, the most; remove one: barchan ssh-key rm FINGERPRINT", len(lines))
		default:
			lines = append(lines, line)
		}
		return lines, nil
	})
	if err != nil {
		return SSHKey{}, err
	}
	st.Log.InfoContext(ctx, "SSH key added", telemetry.Namespace, who.Namespace, telemetry.Name, who.Key, "fingerprint", fingerprint)
	return sshKey(line), nil
}

// DeleteSSHKey removes a public key from an API key. Connections that it has opened get no further channels.
func (st *Store) DeleteSSHKey(ctx context.Context, who Identity, fingerprint string) error {
	err := st.changeSSHKeys(ctx, who, func(lines []string) ([]string, error) {
		i := slices.IndexFunc(lines, func(l string) bool { return sshKey(l).Fingerprint == fingerprint })
		if i < 0 {
			return nil, apistatus.Refuse(errs.ErrNotFound, "SSH key %q not found", fingerprint)
		}
		return slices.Delete(lines, i, i+1), nil
	})
	if err == nil {
		st.Log.InfoContext(ctx, "SSH key removed", telemetry.Namespace, who.Namespace, telemetry.Name, who.Key, "fingerprint", fingerprint)
	}
	return err
}

// writeTries bounds how often a change is made again after another client's.
const writeTries = 5

func (st *Store) changeSSHKeys(ctx context.Context, who Identity, change func(lines []string) ([]string, error)) error {
	for try := 1; ; try++ {
		k, err := st.holder(ctx, who)
		if err != nil {
			return err
		}
		if k.Spec.SSHKeys, err = change(k.Spec.SSHKeys); err != nil {
			return err
		}
		if err = st.Objects.Update(ctx, k); err == nil {
			return nil
		}
		if try == writeTries || !errors.Is(apistatus.Kind(err), errs.ErrConflict) {
			return apistatus.From("write SSH keys", err)
		}
	}
}

// holder reads the object of an API key.
func (st *Store) holder(ctx context.Context, who Identity) (*barchan.APIKey, error) {
	if who.Key == "" {
		return nil, apistatus.Refuse(errs.ErrForbidden, "SSH keys belong to an API key, and a token of the cluster is none; use one: barchan key create")
	}
	k := &barchan.APIKey{}
	if err := st.Objects.Get(ctx, client.ObjectKey{Namespace: who.Namespace, Name: who.Key}, k); err != nil {
		return nil, apistatus.From("read API key", err)
	}
	return k, nil
}

func sshKey(line string) SSHKey {
	fingerprint, _ := barchan.SSHFingerprint(line) // was checked when it was stored
	return SSHKey{Fingerprint: fingerprint, Comment: barchan.SSHComment(line), Line: line}
}
