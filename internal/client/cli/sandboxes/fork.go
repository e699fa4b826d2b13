package sandboxes

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// maxForks is the maximum per request.
const maxForks = 100

// ForkCommand returns `barchan fork`.
func ForkCommand(a *app.App) *cobra.Command {
	n := client.ForkOptions{}
	var timeout time.Duration
	var metadata []string
	cmd := &cobra.Command{
		Use:   "fork SANDBOX",
		Short: "Multiply a running sandbox",
		Long: "Multiply a running sandbox, with its programs, memory and files, and print the ID of each fork as soon as it runs.\n" +
			"The sandbox itself keeps running. Forks fail one by one: the exit code is 1 if any has, and the others run.",
		Example: "  barchan fork i3k\n  for id in $(barchan fork i3k --count 4); do barchan exec $id -- hostname; done",
	}
	f := cmd.Flags()
	f.IntVar(&n.Count, "count", 1, fmt.Sprintf("how many forks, at most %d", maxForks))
	f.DurationVar(&timeout, "timeout", time.Hour, "life of each from now on")
	f.BoolVar(&n.AllowSecrets, "allow-secrets", false, "although it was created with variables, which the forks get")
	f.StringArrayVar(&metadata, "metadata", nil, "NAME=VALUE to keep with each, beside the sandbox's own")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if n.Count < 1 || n.Count > maxForks {
			return app.Usage(cmd, fmt.Errorf("--count: %d is not from 1 to %d", n.Count, maxForks))
		}
		n.Timeout = timeout
		err := app.AtLeastSecond(cmd, "timeout", timeout)
		if err != nil {
			return err
		}
		if n.Metadata, err = keyValues("--metadata", metadata); err != nil {
			return app.Usage(cmd, err)
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error { return fork(cmd.Context(), a, t, args[0], n) })
	}
	return cmd
}

func fork(ctx context.Context, a *app.App, t *app.Server, text string, n client.ForkOptions) error {
	id, err := t.Resolve(ctx, text)
	if err != nil {
		return err
	}
	quiet := sync.OnceFunc(a.NotifyIfSlow("forking " + id))
	defer quiet()
	all, failed := make([]client.Forked, n.Count), 0
	err = t.REST.ForkEach(ctx, id, n, func(place int, one client.Forked) {
		quiet()
		if one.Error != nil {
			failed++
			fmt.Fprintf(a.Stderr, "barchan: fork %d: %s\n", place+1, terminal.Plain(one.Error.Message))
		}
		if one.Sandbox != nil {
			one.Sandbox.AgentToken, one.Sandbox.TrafficToken = "", "" // secrets that users do not need
			if !a.JSON {
				fmt.Fprintln(a.Stdout, one.Sandbox.SandboxID)
			}
		}
		if place >= 0 && place < len(all) {
			all[place] = one
		}
	})
	if err != nil {
		return err
	}
	if a.JSON {
		if err := a.PrintJSON(all); err != nil {
			return err
		}
	}
	if terminal.IsTerminal(a.Stderr) {
		fmt.Fprintf(a.Stderr, "%d of %d forks of %s run\n", n.Count-failed, n.Count, id)
	}
	if failed > 0 {
		return app.ExitCode(app.CodeError)
	}
	return nil
}
