package agent

import (
	"bytes"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
)

// trust adds certificates to those that the sandbox's programs trust.
type trust struct {
	bundle string // what programs read
	extra  string // what the distribution builds the bundle from

	mu sync.Mutex // +checklocksignore, serializes install
}

func systemTrust() *trust {
	return &trust{bundle: "/etc/ssl/certs/ca-certificates.crt", extra: "/usr/local/share/ca-certificates/barchan.crt"}
}

// checkBundle refuses what is not certificates in PEM.
func checkBundle(text string) error {
	rest := []byte(text)
	for len(bytes.TrimSpace(rest)) > 0 {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		if block == nil || block.Type != "CERTIFICATE" {
			return errors.New("caBundle: not certificates in PEM")
		}
	}
	return nil
}

// install adds a bundle once, however often it is called.
func (t *trust) install(text string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, file := range []string{t.extra, t.bundle} {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return fmt.Errorf("install certificates: %w", err)
		}
	}
	if err := os.WriteFile(t.extra, []byte(text), 0o644); err != nil {
		return fmt.Errorf("install certificates: %w", err)
	}
	have, err := os.ReadFile(t.bundle)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read certificates: %w", err)
	}
	if bytes.Contains(have, bytes.TrimSpace([]byte(text))) {
		return nil
	}
	if len(have) > 0 && have[len(have)-1] != '\n' {
		have = append(have, '\n')
	}
	tmp := t.bundle + ".barchan"
	if err := os.WriteFile(tmp, append(have, text+"\n"...), 0o644); err != nil {
		return fmt.Errorf("install certificates: %w", err)
	}
	if err := os.Rename(tmp, t.bundle); err != nil {
		return fmt.Errorf("install certificates: %w", err)
	}
	return nil
}
