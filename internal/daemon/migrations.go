package daemon

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

// before is what a data directory was before this boot wrote to it.
type before struct {
	// used: a server has run here.
	used bool
	// settings are those of its last start; the present ones where they are not known.
	settings config.Config
}

// lookBefore must be called before anything is written.
func lookBefore(cfg *config.Config) (b before, err error) {
	b.settings = *cfg
	trace := filepath.Join("node", "node.db") // the API server's directory may be another process's
	if !cfg.RunsSandboxes() {
		trace = "apiserver"
	}
	_, err = os.Stat(filepath.Join(cfg.DataDir, trace))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return b, fmt.Errorf("look for data of an earlier server: %w", err)
	}
	if b.used = err == nil; !b.used {
		return b, nil
	}
	saved, found, err := config.LoadSaved(cfg.DataDir)
	if err != nil {
		return b, err
	}
	if found {
		b.settings = saved
	}
	return b, nil
}

// steps are all migrations that there have ever been, in their order. One is never changed after
// a release, and never removed: ledgers name it.
func (d *Daemon) steps() []migrate.Step {
	return []migrate.Step{
		{ID: "2026-11-leases-by-subnet", Stage: migrate.Storage, Do: func(ctx context.Context) error {
			if err := failpoint.Err("migrate/leases"); err != nil {
				return err
			}
			err := ipam.MigrateFile(ctx, filepath.Join(d.cfg.DataDir, "node", "node.db"), d.before.settings.Subnet, d.log)
			failpoint.Reach("migrate/moved")
			return err
		}},
	}
}

// migrateStorage brings files and databases of older versions to the form of this one.
func (d *Daemon) migrateStorage(ctx context.Context) (err error) {
	d.migrations, err = migrate.Open(migrate.Config{
		File: filepath.Join(d.cfg.DataDir, "migrations.json"), Steps: d.steps(), Fresh: !d.before.used, Version: d.cfg.Version, Log: d.cfg.Log,
	})
	if err != nil {
		return err
	}
	return d.migrations.Run(ctx, migrate.Storage)
}

// migrateObjects does the same for objects, while only the API server runs.
func (d *Daemon) migrateObjects(ctx context.Context) error {
	return d.migrations.Run(ctx, migrate.Objects)
}
