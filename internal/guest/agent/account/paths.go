package account

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// ResolvePath makes a request's path absolute. Empty is the default directory,
// relative and "~" start at the user's home.
func ResolvePath(path string, acc User, workdir string) (string, error) {
	if strings.ContainsRune(path, 0) {
		return "", fmt.Errorf("path %q has a zero byte", path)
	}
	if path == "" {
		path = workdir
	}
	if path == "~" || strings.HasPrefix(path, "~/") {
		path = filepath.Join(acc.Home, path[1:])
	} else if strings.HasPrefix(path, "~") {
		return "", fmt.Errorf("path %q: only your own home can be written as ~", path)
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join("/", acc.Home, path)
	}
	return filepath.Clean(path), nil
}

// MakeDirs makes a directory and its missing parents, owned by the user. It follows links; another
// kind of file in the path is an ENOTDIR.
func MakeDirs(dir string, acc User) error {
	st, err := os.Stat(dir)
	switch {
	case err == nil && st.IsDir():
		return nil
	case err == nil || errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("make directory %s: %w", dir, syscall.ENOTDIR)
	case !errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("stat directory: %w", err)
	}
	if parent := filepath.Dir(dir); parent != dir {
		if err := MakeDirs(parent, acc); err != nil {
			return err
		}
	}
	err = os.Mkdir(dir, 0o755)
	if errors.Is(err, os.ErrExist) {
		// Created meanwhile, or a dangling link.
		if st, serr := os.Stat(dir); serr == nil && st.IsDir() {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	if int(acc.UID) == os.Geteuid() && int(acc.GID) == os.Getegid() {
		return nil // owned already; a chown would notify watchers
	}
	if err := os.Lchown(dir, int(acc.UID), int(acc.GID)); err != nil {
		return fmt.Errorf("chown directory: %w", err)
	}
	return nil
}
