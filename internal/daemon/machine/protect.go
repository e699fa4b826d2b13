package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// secretDirs are the directories of a data directory whose files are secrets, or lie beside secrets.
var secretDirs = []string{"credentials", "tls", "acme", "peers"}

// publicExt is of certificates.
const publicExt = ".crt"

// Protect makes a data directory, and the secrets in it, accessible to this process's user alone: sandboxes decide what else
// is in it, such as programs that run with the rights of their owner. It logs what it changes. A file of another user is an
// errs.ErrForbidden. The directory itself may have the bits of open.
func Protect(ctx context.Context, dir string, open fs.FileMode, log *slog.Logger) error {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return fmt.Errorf("protect data directory: %w", err)
	}
	if err := protect(ctx, dir, open, log); err != nil {
		return err
	}
	for _, name := range secretDirs {
		err := filepath.WalkDir(filepath.Join(dir, name), func(path string, e fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case err != nil:
				return err
			case e.IsDir() || e.Type().IsRegular() && filepath.Ext(path) != publicExt:
				return protect(ctx, path, 0, log)
			default:
				return nil
			}
		})
		if err != nil {
			return fmt.Errorf("protect data directory: %w", err)
		}
	}
	return nil
}

func protect(ctx context.Context, path string, open fs.FileMode, log *slog.Logger) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fmt.Errorf("protect %s: %w", path, err)
	}
	switch uid := os.Geteuid(); {
	case int(st.Uid) == uid:
	case st.Uid == 0:
		return nil // a volume of Kubernetes, whose group is this process's
	default:
		return fmt.Errorf("%s belongs to user %d, who can read the secrets of the server; give it to user %d with chown: %w", path, st.Uid, uid, errs.ErrForbidden)
	}
	mode := fs.FileMode(st.Mode & uint32(fs.ModePerm))
	closed := mode &^ (0o077 &^ open)
	if mode == closed {
		return nil
	}
	if err := os.Chmod(path, closed); err != nil {
		return fmt.Errorf("protect %s: %w", path, err)
	}
	log.WarnContext(ctx, "mode of data corrected", telemetry.Path, path, "from", mode.String(), "to", closed.String())
	return nil
}
