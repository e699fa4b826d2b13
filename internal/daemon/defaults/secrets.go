package defaults

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/durable"
)

// WriteSecret writes a file atomically and durably.
func WriteSecret(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return durable.WriteFile(path, content, 0o600)
}
