package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

const dirMode = 0o700

// Lock takes a data directory for this process. The error of a directory in use is an
// errs.ErrConflict that names the holder's process ID.
func Lock(dir string) (release func() error, err error) {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, fmt.Errorf("make data directory: %w", err)
	}
	release, holder, err := durable.Lock(filepath.Join(dir, "lock"))
	if errors.Is(err, errs.ErrConflict) {
		return nil, fmt.Errorf("data directory %s is in use by another server (process %s); stop it with `barchan down`, or choose another --data-dir: %w", dir, holder, errs.ErrConflict)
	}
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w", dir, err)
	}
	return release, nil
}
