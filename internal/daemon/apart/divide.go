package apart

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
)

const (
	serverName = "server"
	// ledgerName is of both processes: each has its own steps done.
	ledgerName = "migrations.json"
	// credentialsName stays where clients look for it, as a link.
	credentialsName = "credentials"
)

// serverParts are what a server that is one process keeps in its data directory, and a node does not.
var serverParts = []string{"apiserver", credentialsName, "events", "builds", "tls", "acme", "peers", "members.json"}

// Divide gives the server's process what is its own. It can be repeated, and killed at any instant. The caller holds the data
// directory's lock, and no server's process runs.
func Divide(dataDir string, who user) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("privileges: apart needs root, which starts the server's process as another user: %w", errs.ErrForbidden)
	}
	if err := who.checkWay("dataDir", dataDir); err != nil {
		return err
	}
	dir := ServerDir(dataDir)
	if err := errors.Join(os.Chown(dataDir, 0, who.gid), os.Chmod(dataDir, 0o710), os.MkdirAll(dir, 0o700)); err != nil { //nolint:gosec // the group passes, and lists nothing
		return fmt.Errorf("divide %s: %w", dataDir, err)
	}
	for _, name := range serverParts {
		if err := move(filepath.Join(dataDir, name), filepath.Join(dir, name), who); err != nil {
			return err
		}
	}
	if err := copyLedger(dataDir, dir); err != nil {
		return err
	}
	if err := own(dir, who); err != nil {
		return err
	}
	return link(filepath.Join(serverName, credentialsName), filepath.Join(dataDir, credentialsName))
}

// UniteUnused unites what Divide has divided, for a server that is one process. It does nothing for another role, and nothing if
// there is nothing to do.
func UniteUnused(cfg config.Config) error {
	if _, err := os.Lstat(ServerDir(cfg.DataDir)); err != nil || cfg.Role != config.RoleServer || cfg.NodeSocket != "" {
		return nil //nolint:nilerr // the boot reports what is wrong with the directory
	}
	release, err := machine.Lock(cfg.DataDir)
	if err != nil {
		return err
	}
	return errors.Join(Unite(cfg.DataDir), release())
}

// Unite undoes Divide.
func Unite(dataDir string) error {
	dir := ServerDir(dataDir)
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := own(dir, user{}); err != nil {
		return err
	}
	if info, err := os.Lstat(filepath.Join(dataDir, credentialsName)); err == nil && info.Mode().Type() == fs.ModeSymlink {
		if err := os.Remove(filepath.Join(dataDir, credentialsName)); err != nil {
			return fmt.Errorf("unite %s: %w", dataDir, err)
		}
	}
	for _, name := range serverParts {
		if err := move(filepath.Join(dir, name), filepath.Join(dataDir, name), user{}); err != nil {
			return err
		}
	}
	if err := errors.Join(os.RemoveAll(dir), os.RemoveAll(accountDir(dataDir)), os.Chown(dataDir, 0, 0), os.Chmod(dataDir, 0o700)); err != nil { //nolint:gosec // a directory
		return fmt.Errorf("unite %s: %w", dataDir, err)
	}
	return nil
}

// move gives a part to a user and moves it, unless that was done.
func move(from, to string, who user) error {
	info, err := os.Lstat(from)
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.Mode().Type() == fs.ModeSymlink {
		return nil
	}
	if err != nil {
		return fmt.Errorf("move %s: %w", from, err)
	}
	if _, err := os.Lstat(to); err == nil {
		return fmt.Errorf("move %s: there is %s already; remove the one that is not used: %w", from, to, errs.ErrConflict)
	}
	if err := own(from, who); err != nil {
		return err
	}
	failpoint.Reach("apart/owned")
	if err := os.Rename(from, to); err != nil {
		return fmt.Errorf("move %s: %w", from, err)
	}
	failpoint.Reach("apart/moved")
	return durable.SyncDirs(filepath.Dir(from), filepath.Dir(to))
}

// own gives a tree to a user. A file with several names is not given away, since another name may be root's.
func own(tree string, who user) error {
	return filepath.WalkDir(tree, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return fmt.Errorf("change the owner of %s: %w", tree, err)
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return fmt.Errorf("change the owner of %s: %w", path, err)
		}
		if int(st.Uid) == who.uid && int(st.Gid) == who.gid {
			return nil
		}
		switch kind := st.Mode & unix.S_IFMT; {
		case kind == unix.S_IFLNK && who.uid == 0:
			return errNotUnited(path, "a symbolic link")
		case kind == unix.S_IFREG && st.Nlink > 1:
			return errNotUnited(path, "a file with several names")
		}
		if err := os.Lchown(path, who.uid, who.gid); err != nil {
			return fmt.Errorf("change the owner of %s: %w", path, err)
		}
		return nil
	})
}

// copyLedger gives the server's process the migrations that were done.
func copyLedger(from, to string) error {
	if _, err := os.Lstat(filepath.Join(to, ledgerName)); err == nil {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(from, ledgerName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("divide %s: %w", from, err)
	}
	return durable.WriteFile(filepath.Join(to, ledgerName), b, 0o600)
}

// link makes a symbolic link, unless something is there.
func link(target, path string) error {
	if err := os.Symlink(target, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("link %s: %w", path, err)
	}
	return nil
}
