package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// resolvePath makes a request's path absolute. Empty is the default directory,
// relative and "~" start at the user's home.
func resolvePath(path string, acc account, workdir string) (string, error) {
	if strings.ContainsRune(path, 0) {
		return "", fmt.Errorf("path %q has a zero byte", path)
	}
	if path == "" {
		path = workdir
	}
	if path == "~" || strings.HasPrefix(path, "~/") {
		path = filepath.Join(acc.home, path[1:])
	} else if strings.HasPrefix(path, "~") {
		return "", fmt.Errorf("path %q: only your own home can be written as ~", path)
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join("/", acc.home, path)
	}
	return filepath.Clean(path), nil
}

// makeDirs makes a directory and its missing parents, which then belong to
// the user. It follows links, and says so if something else is in the way.
func makeDirs(dir string, acc account) error {
	st, err := os.Stat(dir)
	switch {
	case err == nil && st.IsDir():
		return nil
	case err == nil || errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("make directory %s: %w", dir, syscall.ENOTDIR)
	case !errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("look at directory: %w", err)
	}
	if parent := filepath.Dir(dir); parent != dir {
		if err := makeDirs(parent, acc); err != nil {
			return err
		}
	}
	err = os.Mkdir(dir, 0o755)
	if errors.Is(err, os.ErrExist) {
		// Somebody was faster, or a link leads nowhere.
		if st, serr := os.Stat(dir); serr == nil && st.IsDir() {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	if int(acc.uid) == os.Geteuid() && int(acc.gid) == os.Getegid() {
		return nil // it is the user's already, and watchers need not hear of it
	}
	if err := os.Lchown(dir, int(acc.uid), int(acc.gid)); err != nil {
		return fmt.Errorf("own directory: %w", err)
	}
	return nil
}
