package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/restclient"
)

// each calls do for every named sandbox, and prints the IDs of successes. An error does not stop the
// others.
func (a *app) each(ctx context.Context, names []string, do func(t *target, id string) error) error {
	return a.withTarget(ctx, func(t *target) error {
		var failed []error
		for _, name := range names {
			id, err := t.resolve(ctx, name)
			if err == nil {
				err = do(t, id)
			}
			if err != nil {
				failed = append(failed, err)
				continue
			}
			fmt.Fprintln(a.stdout, id)
		}
		return errors.Join(failed...)
	})
}

func (a *app) killCommand() *cobra.Command {
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
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if all == (len(args) > 0) {
			return &usageError{cmd, errors.New("want either SANDBOX or --all")}
		}
		if all {
			err := a.withTarget(cmd.Context(), func(t *target) error {
				list, err := t.rest.List(cmd.Context(), restclient.ListOptions{States: anyState()})
				for _, s := range list {
					args = append(args, s.SandboxID)
				}
				return err
			})
			if err != nil {
				return err
			}
		}
		return a.each(cmd.Context(), args, func(t *target, id string) error { return t.rest.Kill(cmd.Context(), id) })
	}
	return cmd
}

func (a *app) pauseCommand() *cobra.Command {
	var filesOnly bool
	cmd := &cobra.Command{
		Use:     "pause SANDBOX...",
		Aliases: []string{"stop"},
		Short:   "Pause sandboxes",
		Long: "Pause sandboxes, which keep their memory and continue with it when they are resumed; with --files-only they keep\n" +
			"their files, and their programs end. As with Docker, what is stopped stays: `barchan kill` deletes it.",
		Example: "  barchan pause i3k\n  barchan pause i3k --files-only",
		Args:    atLeast("SANDBOX"),
	}
	cmd.Flags().BoolVar(&filesOnly, "files-only", false, "keep the files and end the programs")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.each(cmd.Context(), args, func(t *target, id string) error {
			if filesOnly {
				return t.rest.PauseFiles(cmd.Context(), id)
			}
			return t.rest.Pause(cmd.Context(), id)
		})
	}
	return cmd
}

func (a *app) resumeCommand() *cobra.Command {
	var timeout time.Duration
	var filesOnly bool
	cmd := &cobra.Command{
		Use:     "resume SANDBOX...",
		Aliases: []string{"start"},
		Short:   "Resume paused sandboxes",
		Long: "Resume paused sandboxes. With --files-only, discard the saved memory permanently and restart from the files; use this\n" +
			"when memory cannot be restored.",
		Example: "  barchan resume i3k\n  barchan resume i3k --files-only",
		Args:    atLeast("SANDBOX"),
	}
	cmd.Flags().BoolVar(&filesOnly, "files-only", false, "discard the memory, and restart from the files")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Hour, "life from now on")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if timeout < time.Second {
			return &usageError{cmd, fmt.Errorf("--timeout: %s is too short, want at least 1s", timeout)}
		}
		return a.each(cmd.Context(), args, func(t *target, id string) error {
			connect := t.rest.Connect
			if filesOnly {
				connect = t.rest.ConnectFiles
			}
			_, err := connect(cmd.Context(), id, int64(timeout/time.Second))
			return err
		})
	}
	return cmd
}
