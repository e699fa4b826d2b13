package programs

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/durable"
)

// InstallAgent copies the agent into a directory and returns the copy's path. Sandboxes have a hard link to
// the copy, so that an upgrade changes no running sandbox.
func InstallAgent(binary, dir string) (string, error) {
	from, err := os.Open(binary)
	if err != nil {
		return "", fmt.Errorf("install agent: %w", err)
	}
	defer func() { _ = from.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, from); err != nil {
		return "", fmt.Errorf("install agent: %w", err)
	}
	file := filepath.Join(dir, hex.EncodeToString(sum.Sum(nil)[:16]))
	if _, err := os.Stat(file); err == nil {
		return file, nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return "", fmt.Errorf("install agent: %w", err)
	}
	if _, err := from.Seek(0, io.SeekStart); err != nil {
		return "", fmt.Errorf("install agent: %w", err)
	}
	if err := durable.CopyProgram(from, file); err != nil {
		return "", fmt.Errorf("install agent: %w", err)
	}
	return file, nil
}
