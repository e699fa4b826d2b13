package apiserver

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

const lockFile = "apiserver.lock"

// lockDir takes the data directory for this server, or says which process has it.
func lockDir(dir string) (unlock func(), err error) {
	release, holder, err := durable.Lock(filepath.Join(dir, lockFile))
	if errors.Is(err, errs.ErrConflict) {
		return nil, fmt.Errorf("data directory %s: %w: in use by another server (process %s)", dir, errs.ErrConflict, holder)
	}
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w", dir, err)
	}
	return func() { _ = release() }, nil // nothing hangs on the close of a lock file
}
