package netdev

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// shareDir makes the directory of namespaces a shared mount, as ip(8) does before its first
// namespace. A later mount by ip(8) would cover existing namespaces, which then could not be
// removed.
func shareDir(dir string) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create directory of namespaces: %w", err)
	}
	lock, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open directory of namespaces: %w", err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil { // ip(8) uses the same lock
		return fmt.Errorf("lock %s: %w", dir, err)
	}
	err = unix.Mount("", dir, "", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // no mount yet
		if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s to itself: %w", dir, err)
		}
		err = unix.Mount("", dir, "", unix.MS_SHARED|unix.MS_REC, "")
	}
	if err != nil {
		return fmt.Errorf("share %s: %w", dir, err)
	}
	return nil
}
