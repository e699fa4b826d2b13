package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

func (a *app) doctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this machine can run sandboxes",
		Long:  "Check this machine, and the server if it runs. The exit code is 1 if something must be done.",
		Args:  exactly(),
	}
	a.jsonFlag(cmd)
	flags := config.AddFlags(cmd.Flags(), notDataDir)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := a.config(flags)
		if err != nil {
			return err
		}
		return a.printChecks(a.checks(cmd.Context(), cfg))
	}
	return cmd
}

// checks asks the server, which looks at the machine too; without one this program looks.
func (a *app) checks(ctx context.Context, cfg *config.Resolved) []adminclient.Check {
	checks, err := adminclient.New(cfg.AdminSocket(), cfg.DataDir).Doctor(ctx)
	if err == nil {
		return checks
	}
	checks = []adminclient.Check{}
	if a.deps.Doctor != nil {
		checks = append(checks, a.deps.Doctor(ctx, cfg.Config)...)
	}
	if errors.Is(err, adminclient.ErrNotRunning) {
		return append(checks, adminclient.Check{
			Name: "server", State: adminclient.CheckWarning, Detail: "not running on " + cfg.DataDir, Remedy: "start it with `barchan up`",
		})
	}
	return append(checks, adminclient.Check{
		Name: "server", State: adminclient.CheckFailed, Detail: message(err), Remedy: "see its log, " + cfg.LogFile(),
	})
}

func (a *app) printChecks(checks []adminclient.Check) error {
	failed := 0
	for _, c := range checks {
		if c.State == adminclient.CheckFailed {
			failed++
		}
	}
	if a.json {
		if err := a.printJSON(checks); err != nil {
			return err
		}
	} else {
		tab := newTable("CHECK", "STATE", "DETAIL")
		tab.colour = a.stateColours(1)
		for _, c := range checks {
			detail := c.Detail
			if c.Remedy != "" {
				detail += "; " + c.Remedy
			}
			tab.add(c.Name, c.State, detail)
		}
		tab.write(a.stdout)
	}
	if failed > 0 {
		fmt.Fprintf(a.stderr, "barchan: %d of %d checks failed\n", failed, len(checks))
		return exitCode(exitError)
	}
	return nil
}
