// Package upgrade brings the data of older versions to the form of this one.
package upgrade

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/migrate"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/node/ipam"
)

// Before is what a data directory was before this boot wrote to it.
type Before struct {
	// Used: a server has run here.
	Used bool
	// Settings are those of its last start; the present ones where they are not known.
	Settings config.Config
}

// Look must be called before anything is written.
func Look(cfg *config.Config) (b Before, err error) {
	b.Settings = *cfg
	trace := filepath.Join("node", "node.db") // the API server's directory may be another process's
	if !cfg.RunsSandboxes() {
		trace = "apiserver"
	}
	_, err = os.Stat(filepath.Join(cfg.DataDir, trace))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return b, fmt.Errorf("look for data of an earlier server: %w", err)
	}
	if b.Used = err == nil; !b.Used {
		return b, nil
	}
	saved, found, err := config.LoadSaved(cfg.DataDir)
	if err != nil {
		return b, err
	}
	if found {
		b.Settings = saved
	}
	return b, nil
}

// Open returns the migrations of a data directory, none of which has run.
func Open(cfg migrate.Config, dataDir string, before Before) (*migrate.Migrations, error) {
	cfg.File, cfg.Fresh = filepath.Join(dataDir, "migrations.json"), !before.Used
	// All that there have ever been, in their order. One is never changed after a release, and never removed: ledgers name it.
	cfg.Steps = []migrate.Step{
		{ID: "2026-11-leases-by-subnet", Stage: migrate.Storage, Do: func(ctx context.Context) error {
			if err := failpoint.Err("migrate/leases"); err != nil {
				return err
			}
			err := ipam.MigrateFile(ctx, filepath.Join(dataDir, "node", "node.db"), before.Settings.Subnet, cfg.Log)
			failpoint.Reach("migrate/moved")
			return err
		}},
	}
	return migrate.Open(cfg)
}
