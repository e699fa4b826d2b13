package main

import (
	"context"
	"errors"
	"io"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon"
	"github.com/barchan-dev/barchan/internal/daemon/adminops"
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
			d, err := daemon.New(daemon.Config{Config: cfg, Version: version, Log: logger, AfterReexec: isReexec()})
			if err != nil {
				return err
			}
			err = d.Run(ctx)
			if errors.Is(err, daemon.ErrReexec) {
				return reexec(err)
			}
			return err
		},
		RemoveAll: func(ctx context.Context, cfg config.Config, progress func(adminclient.Event)) error {
			return daemon.RemoveAll(ctx, cfg, telemetry.Discard(), progress)
		},
		Doctor: func(ctx context.Context, cfg config.Config) []adminclient.Check {
			return adminops.Doctor(ctx, cfg, true)
		},
		Audit: func(ctx context.Context, cfg config.Config) ([]adminclient.Finding, error) {
			return daemon.AuditMachine(ctx, cfg, telemetry.Discard())
		},
	}
}
