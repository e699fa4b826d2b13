package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

func (a *app) doctorCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this machine can run sandboxes",
		Long: "Check this machine, and the server if it runs. The exit code is 1 if something must be done.\n" +
			"With --deep, look for what belongs to no sandbox, or lacks what it belongs to: network namespaces, links, rules,\n" +
			"mounts, snapshots, addresses, cgroups, processes, files, memory images, objects and routes.",
		Args: exactly(),
	}
	a.jsonFlag(cmd)
	var deep bool
	cmd.Flags().BoolVar(&deep, "deep", false, "look for what was leaked, instead of checking the machine")
	flags := config.AddFlags(cmd.Flags(), notDataDir)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := a.config(flags)
		if err != nil {
			return err
		}
		if deep {
			found, err := a.audit(cmd.Context(), cfg)
			if printed := a.printFindings(found, err == nil); err == nil {
				err = printed
			}
			return err
		}
		return a.printChecks(a.checks(cmd.Context(), cfg))
	}
	return cmd
}

// audit calls the server; without one this program makes the checks that it can, and says so.
func (a *app) audit(ctx context.Context, cfg *config.Resolved) ([]adminclient.Finding, error) {
	found, err := adminclient.New(cfg.AdminSocket(), cfg.DataDir).Audit(ctx)
	if !errors.Is(err, adminclient.ErrNotRunning) || a.deps.Audit == nil {
		return found, err
	}
	fmt.Fprintf(a.stderr, "barchan: no server runs on %s; objects and routes are not looked at\n", cfg.DataDir)
	return a.deps.Audit(ctx, cfg.Config)
}

// printFindings prints the findings of an audit. whole means that it was complete.
func (a *app) printFindings(found []adminclient.Finding, whole bool) error {
	switch {
	case a.json:
		if found == nil {
			found = []adminclient.Finding{}
		}
		if err := a.printJSON(found); err != nil {
			return err
		}
	case len(found) > 0:
		tab := newTable("WHERE", "WHAT", "REMEDY")
		for _, f := range found {
			tab.add(f.Where, f.What, f.Remedy)
		}
		tab.write(a.stdout)
	case whole:
		fmt.Fprintln(a.stdout, "Nothing is leaked.")
	}
	if len(found) > 0 {
		fmt.Fprintf(a.stderr, "barchan: %d found\n", len(found))
		return exitCode(exitError)
	}
	return nil
}

// checks calls the server, which checks the machine too; without one this program does.
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
