package kubecluster

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
)

// dirPrefix begins the names of the clusters' directories, which their cgroups share.
const dirPrefix = "barchan-kube-"

const lockFile = "lock"

// makeDir makes the directory of a cluster. Its lock is held as long as the process lives.
func makeDir(u *undo) (string, error) {
	dir, err := os.MkdirTemp("", dirPrefix) // short, for sockets lie below
	if err != nil {
		return "", err
	}
	u.add(func() error { return os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // users in Pods read mounted files
		return "", err
	}
	lock, err := os.Create(filepath.Join(dir, "new"))
	if err != nil {
		return "", err
	}
	u.add(lock.Close)
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", err
	}
	return dir, os.Rename(lock.Name(), filepath.Join(dir, lockFile))
}

// removeStale removes directories and cgroups of tests that were killed. Their programs ended with them.
func removeStale() error {
	locks, err := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*", lockFile))
	if err != nil {
		return err
	}
	var failures []error
	for _, path := range locks {
		lock, err := os.Open(path)
		if err != nil {
			continue // its cluster has just ended
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			dir := filepath.Dir(path)
			failures = append(failures, cgroups.Remove("/"+filepath.Base(dir)), os.RemoveAll(dir))
		}
		failures = append(failures, lock.Close())
	}
	return errors.Join(failures...)
}
