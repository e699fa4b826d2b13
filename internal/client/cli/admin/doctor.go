package admin

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/config"
)

// DoctorCommand returns `barchan doctor`.
func DoctorCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this machine can run sandboxes",
		Long: "Check this machine, and the server if it runs. The exit code is 1 if something must be done.\n" +
			"With --deep, look for what belongs to no sandbox, or lacks what it belongs to: network namespaces, links, rules,\n" +
			"mounts, snapshots, addresses, cgroups, processes, files, memory images, objects and routes.\n" +
			"With --bundle, write a support bundle for a bug report, also while the server is down: versions, facts of the machine,\n" +
			"settings, checks, conditions, metrics, goroutines, stages of the journal, lists of objects, events and the end of\n" +
			"the log, without secrets. The exit code is 0 also if a part is missing; the file is for its owner alone.",
		Example: "  barchan doctor --bundle\n  barchan doctor --bundle report.tar.gz --json | jq -r '.parts[].name'",
	}
	a.JSONFlag(cmd)
	var deep bool
	cmd.Flags().BoolVar(&deep, "deep", false, "look for what was leaked, instead of checking the machine")
	file := bundleFlag(cmd)
	return withSettings(a, cmd, func(cmd *cobra.Command, cfg *config.Resolved) error {
		switch given := cmd.Flags().Changed("bundle"); {
		case given && deep:
			return app.Usage(cmd, errors.New("--bundle and --deep exclude each other"))
		case given && *file == "":
			return app.Usage(cmd, errors.New("--bundle: the name of the file is empty"))
		case given:
			return writeBundle(cmd.Context(), a, cfg, *file)
		}
		if deep {
			found, err := audit(cmd.Context(), a, cfg)
			if printed := printFindings(a, found, err == nil); err == nil {
				err = printed
			}
			return err
		}
		return a.PrintChecks(checks(cmd.Context(), a, cfg))
	})
}

// audit calls the server; without one this program runs the checks that need none, and reports it.
func audit(ctx context.Context, a *app.App, cfg *config.Resolved) ([]adminclient.Finding, error) {
	found, err := adminclient.New(cfg.AdminSocket(), cfg.DataDir).Audit(ctx)
	if !errors.Is(err, adminclient.ErrNotRunning) || a.Deps.Audit == nil {
		return found, err
	}
	fmt.Fprintf(a.Stderr, "barchan: no server on %s; objects and routes are not checked\n", cfg.DataDir)
	return a.Deps.Audit(ctx, cfg.Config)
}

// printFindings prints the findings of an audit. whole means that it was complete.
func printFindings(a *app.App, found []adminclient.Finding, whole bool) error {
	switch {
	case a.JSON:
		if found == nil {
			found = []adminclient.Finding{}
		}
		if err := a.PrintJSON(found); err != nil {
			return err
		}
	case len(found) > 0:
		tab := terminal.NewTable("WHERE", "WHAT", "REMEDY")
		for _, f := range found {
			tab.Add(f.Where, f.What, f.Remedy)
		}
		tab.Write(a.Stdout)
	case whole:
		fmt.Fprintln(a.Stdout, "Nothing is leaked.")
	}
	if len(found) > 0 {
		fmt.Fprintf(a.Stderr, "barchan: %d found\n", len(found))
		return app.ExitCode(app.CodeError)
	}
	return nil
}

// checks calls the server, which checks the machine too; without one this program does.
func checks(ctx context.Context, a *app.App, cfg *config.Resolved) []adminclient.Check {
	checks, err := adminclient.New(cfg.AdminSocket(), cfg.DataDir).Doctor(ctx)
	if err == nil {
		return checks
	}
	checks = []adminclient.Check{}
	if a.Deps.Doctor != nil {
		checks = append(checks, a.Deps.Doctor(ctx, cfg.Config)...)
	}
	if errors.Is(err, adminclient.ErrNotRunning) {
		return append(checks, adminclient.Check{
			Name: "server", State: adminclient.CheckWarning, Detail: "not running on " + cfg.DataDir, Remedy: "start it with `barchan up`",
		})
	}
	return append(checks, adminclient.Check{
		Name: "server", State: adminclient.CheckFailed, Detail: app.Message(err), Remedy: "see its log, " + cfg.LogFile(),
	})
}
