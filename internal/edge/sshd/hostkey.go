package sshd

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/crypto/ssh"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// HostKey is the server's private key.
type HostKey struct{ signer ssh.Signer }

// Public returns the public part, as in known_hosts.
func (k *HostKey) Public() string {
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(k.signer.PublicKey())))
}

// OpenHostKey reads the server's private key, and makes one (Ed25519) where there is none yet. The directory is made too. A file that
// cannot be read is an error, and never replaced: clients have noted the key.
func OpenHostKey(file string) (*HostKey, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		text, err = makeHostKey(file)
	}
	if err != nil {
		return nil, fmt.Errorf("host key: %w", err)
	}
	key, err := ssh.ParsePrivateKey(text)
	if err != nil {
		return nil, fmt.Errorf("host key %s: %w; restore it, or remove it and have clients accept a new one: %w", file, err, errs.ErrInvalid)
	}
	return &HostKey{key}, nil
}

func makeHostKey(file string) ([]byte, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	block, err := ssh.MarshalPrivateKey(key, "barchan")
	if err != nil {
		return nil, err
	}
	text := pem.EncodeToMemory(block)
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return nil, err
	}
	if err := durable.WriteFile(file, text, 0o600); err != nil {
		return nil, err
	}
	return text, nil
}
