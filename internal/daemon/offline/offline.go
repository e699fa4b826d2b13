// Package offline does what needs no running server: it removes all that servers left of a data directory, and audits a machine.
package offline

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/audit"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/daemon/reserve"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/memstore"
)

// RemoveAll removes what servers left of a data directory that no server uses: sandboxes,
// network, cgroups, containerd, and the directory itself. The cache stays. Repeating it is
// harmless; what could not be removed is an error, and the directory then stays as the record of it.
func RemoveAll(ctx context.Context, cfg config.Config, log *slog.Logger, progress func(adminclient.Event)) (err error) {
	if _, err := os.Stat(cfg.DataDir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	release, err := machine.Lock(cfg.DataDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	removed := func(what string) { progress(adminclient.Event{Step: "removed", Message: what}) }
	if cfg.RunsSandboxes() {
		if err := removeMachine(ctx, cfg, log, removed); err != nil {
			return err
		}
	}
	// Sandboxes have written the volumes, maybe deeper than os.RemoveAll can go.
	if err := disk.DiscardBelow(filepath.Join(cfg.DataDir, "node")); err != nil {
		return err
	}
	if err := volumetree.RemoveAll(ctx, filepath.Join(cfg.DataDir, "node", "volumes")); err != nil {
		return err
	}
	for _, dir := range []string{cfg.RunDir, cfg.DataDir} {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove %s: %w", dir, err)
		}
	}
	removed(cfg.DataDir)
	return nil
}

// removeMachine removes what runs or lies on this machine outside the directories.
func removeMachine(ctx context.Context, cfg config.Config, log *slog.Logger, removed func(string)) error {
	// Encrypted memory goes as a whole, so that a lost key does not matter.
	if err := memstore.Discard(filepath.Join(cfg.DataDir, "node")); err != nil {
		return err
	}
	cfg.MemoryEncryption = config.EncryptionOff
	m, err := machine.New(&cfg, log, machine.Hooks{})
	if err != nil {
		return err
	}
	var stack lifecycle.Stack
	if err = boot.Push(ctx, &stack, m.Files()); err == nil {
		err = m.CheckExternal(ctx)
	}
	if err == nil {
		err = boot.Push(ctx, &stack, m.Services()...)
	}
	if err == nil {
		err = m.RemoveLeftovers(ctx, removed)
	}
	if err == nil { // or the removal of the directories would reach into them
		err = m.Node.Volumes.DetachAll(ctx)
	}
	if err == nil && m.Supervisor == nil { // the containerd stays, with nothing of ours in it
		if err = m.Containers.Purge(ctx); err == nil {
			removed("images in containerd's namespace " + cfg.ContainerdNamespace)
		}
	}
	if err = errors.Join(err, stack.Stop()); err != nil {
		return fmt.Errorf("remove what runs: %w", err)
	}
	removed("network " + cfg.BridgeName)
	if m.Supervisor != nil {
		if err := m.Supervisor.Stop(ctx); err != nil {
			return err
		}
		removed("containerd")
	}
	return reserve.Remove(cfg.CgroupParent) // containerd was in one of them
}

// Audit audits a machine without a running server of this data directory, so without objects and
// routes. It returns what it found, also with an error.
func Audit(ctx context.Context, cfg config.Config, log *slog.Logger) (found []adminclient.Finding, err error) {
	if _, err := os.Stat(cfg.DataDir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	release, err := machine.Lock(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	m, err := machine.New(&cfg, log, machine.Hooks{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if err := m.Node.LoadJournal(); err != nil {
		return nil, err
	}
	return audit.Machine(ctx, m.Node, &cfg)
}
