package disk

import (
	"fmt"
	"os"
	"path/filepath"
)

// Directory creates a volume's directory and the requested path in it, which must not escape through a link
// that a sandbox created.
func Directory(dir, sub string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("create volume: %w", err)
	}
	if err := os.Chmod(dir, 0o777); err != nil { // the sandbox's users share it
		return "", fmt.Errorf("create volume: %w", err)
	}
	if sub == "" {
		return dir, nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", fmt.Errorf("open volume: %w", err)
	}
	defer func() { _ = root.Close() }()
	if err := root.MkdirAll(sub, 0o777); err != nil {
		return "", fmt.Errorf("create path %q of volume: %w", sub, err)
	}
	full, err := filepath.EvalSymlinks(filepath.Join(dir, sub))
	if err != nil {
		return "", fmt.Errorf("resolve path %q of volume: %w", sub, err)
	}
	return full, nil
}
