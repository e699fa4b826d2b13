package sandboxes

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// each calls do for every named sandbox, and prints the IDs of successes. An error does not stop the
// others.
func each(ctx context.Context, a *app.App, names []string, do func(t *app.Server, id string) error) error {
	return a.WithServer(ctx, func(t *app.Server) error {
		return a.Each(names, func(name string) (string, error) {
			id, err := t.Resolve(ctx, name)
			if err == nil {
				err = do(t, id)
			}
			return id, err
		})
	})
}

// KillCommand returns `barchan kill`.
func KillCommand(a *app.App) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:     "kill SANDBOX...",
		Aliases: []string{"rm"},
		Short:   "Delete sandboxes",
		Long:    "Delete sandboxes, running or paused, with their memory and files. `barchan pause` keeps them.",
		Example: "  barchan kill i3k\n  barchan kill $(barchan ls -q --metadata job=nightly)",
		Args:    cobra.ArbitraryArgs,
	}
	cmd.Flags().BoolVar(&all, "all", false, "end all sandboxes of the key's namespace")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if all == (len(args) > 0) {
			return app.Usage(cmd, errors.New("want either SANDBOX or --all"))
		}
		if all {
			err := a.WithServer(cmd.Context(), func(t *app.Server) error {
				list, err := t.REST.List(cmd.Context(), client.ListOptions{States: app.AnyState()})
				for _, s := range list {
					args = append(args, s.SandboxID)
				}
				return err
			})
			if err != nil {
				return err
			}
		}
		return each(cmd.Context(), a, args, func(t *app.Server, id string) error { return t.REST.Kill(cmd.Context(), id) })
	}
	return cmd
}

// PauseCommand returns `barchan pause`.
func PauseCommand(a *app.App) *cobra.Command {
	var filesOnly bool
	cmd := &cobra.Command{
		Use:     "pause SANDBOX...",
		Aliases: []string{"stop"},
		Short:   "Pause sandboxes",
		Long: "Pause sandboxes, which keep their memory and continue with it when they are resumed; with --files-only they keep\n" +
			"their files, and their programs end. As with Docker, what is stopped stays: `barchan kill` deletes it.",
		Example: "  barchan pause i3k\n  barchan pause i3k --files-only",
	}
	cmd.Flags().BoolVar(&filesOnly, "files-only", false, "keep the files and end the programs")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return each(cmd.Context(), a, args, func(t *app.Server, id string) error {
			return t.REST.Pause(cmd.Context(), id, client.PauseOptions{FilesOnly: filesOnly})
		})
	}
	return cmd
}

// ResumeCommand returns `barchan resume`.
func ResumeCommand(a *app.App) *cobra.Command {
	var timeout time.Duration
	var filesOnly bool
	cmd := &cobra.Command{
		Use:     "resume SANDBOX...",
		Aliases: []string{"start"},
		Short:   "Resume paused sandboxes",
		Long: "Resume paused sandboxes. With --files-only, discard the saved memory permanently and restart from the files; use this\n" +
			"when memory cannot be restored.",
		Example: "  barchan resume i3k\n  barchan resume i3k --files-only",
	}
	cmd.Flags().BoolVar(&filesOnly, "files-only", false, "discard the memory, and restart from the files")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Hour, "life from now on")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := app.AtLeastSecond(cmd, "timeout", timeout); err != nil {
			return err
		}
		return each(cmd.Context(), a, args, func(t *app.Server, id string) error {
			_, err := t.REST.Connect(cmd.Context(), id, client.ConnectOptions{Timeout: timeout, DiscardMemory: filesOnly})
			return err
		})
	}
	return cmd
}
