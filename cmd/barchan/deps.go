package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon"
	"github.com/barchan-dev/barchan/internal/daemon/adminops"
	"github.com/barchan-dev/barchan/internal/daemon/apart"
	"github.com/barchan-dev/barchan/internal/daemon/offline"
	"github.com/barchan-dev/barchan/internal/daemon/reserve"
)

// deps returns the server functions of the command line.
func deps() app.Deps {
	return app.Deps{
		Version: version,
		RunServer: func(ctx context.Context, cfg config.Config, log io.Writer) error {
			logger, err := telemetry.NewLogger(log, telemetry.LogConfig{Format: cfg.LogFormat, Level: cfg.LogLevel})
			if err != nil {
				return err
			}
			if cfg.Privileges == config.PrivilegesApart {
				err = runApart(ctx, cfg, logger, log)
			} else {
				err = runTogether(ctx, cfg, logger)
			}
			if errors.Is(err, daemon.ErrReexec) {
				return reexec(err)
			}
			return err
		},
		RemoveAll: func(ctx context.Context, cfg config.Config, progress func(adminclient.Event)) error {
			return offline.RemoveAll(ctx, cfg, telemetry.Discard(), progress)
		},
		Doctor: func(ctx context.Context, cfg config.Config) []adminclient.Check {
			return adminops.Doctor(ctx, cfg, true)
		},
		Audit: func(ctx context.Context, cfg config.Config) ([]adminclient.Finding, error) {
			return offline.Audit(ctx, cfg, telemetry.Discard())
		},
		Journal: offline.Journal,
	}
}

// runTogether runs all of a role in this process.
func runTogether(ctx context.Context, cfg config.Config, logger *slog.Logger) error {
	child := apart.IsServer()
	if !child {
		if err := apart.UniteUnused(cfg); err != nil {
			return err
		}
	}
	if cfg.Role == config.RoleServer && cfg.RunsSandboxes() {
		join(ctx, cfg, logger, "server", os.Getpid())
	}
	d, err := daemon.New(daemon.Config{Config: cfg, Version: version, Log: logger, AfterReexec: isReexec(), NodeComes: child})
	if err != nil {
		return err
	}
	return d.Run(ctx)
}

// runApart runs the node in this process, and the server in one without root.
func runApart(ctx context.Context, cfg config.Config, logger *slog.Logger, output io.Writer) error {
	anew := isReexec()
	join(ctx, cfg, logger, "node", os.Getpid())
	return apart.Run(ctx, apart.Config{
		Config: cfg, Log: logger, Output: output,
		Started: func(pid int) { join(ctx, cfg, logger, "server", pid) },
		Final:   func(err error) bool { return errors.Is(err, daemon.ErrReexec) },
		Node: func(ctx context.Context, cfg config.Config, server adminops.ServerProcess) (bool, error) {
			d, err := daemon.New(daemon.Config{Config: cfg, Version: version, Log: logger, AfterReexec: anew, Server: server})
			if err != nil {
				return false, err
			}
			err = d.Run(ctx)
			return d.Booted(), err
		},
	})
}

// join reserves for a process. One without a share of its own works as well, until the machine is short of it.
func join(ctx context.Context, cfg config.Config, logger *slog.Logger, name string, pid int) {
	if err := reserve.Join(cfg.CgroupParent, name, pid); err != nil {
		logger.WarnContext(ctx, "no processors and memory reserved", telemetry.Error, err)
	}
}
