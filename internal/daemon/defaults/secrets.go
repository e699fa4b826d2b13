package defaults

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/durable"
)

const (
	secretBytes = 32
	secretMode  = 0o600
)

// LoadSecret reads a file of random bytes, or makes it.
func LoadSecret(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	switch {
	case err == nil && len(b) == secretBytes:
		return b, nil
	case err == nil:
		return nil, fmt.Errorf("secret %s has %d bytes, want %d: restore it from a backup; without it the tokens of all sandboxes change", path, len(b), secretBytes)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("read secret: %w", err)
	}
	b = make([]byte, secretBytes)
	if _, err := rand.Read(b); err != nil {
		return nil, fmt.Errorf("make secret: %w", err)
	}
	return b, WriteSecret(path, b)
}

// WriteSecret writes a file atomically and durably.
func WriteSecret(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return durable.WriteFile(path, content, secretMode)
}
