package admin

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/config"
)

// serverEnds is how long a server may take to exit after it accepted the request.
const serverEnds = time.Minute

// DownCommand returns `barchan down`.
func DownCommand(a *app.App) *cobra.Command {
	var all, yes bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Stop the server; sandboxes keep running",
		Long: "Stop the server. Sandboxes keep running, and the next start adopts them.\n" +
			"With --all, end every sandbox and remove all that Barchan made on this machine but for the cache.",
	}
	cmd.Flags().BoolVar(&all, "all", false, "also remove all sandboxes, their network and the data directory")
	cmd.Flags().BoolVar(&yes, "yes", false, "with --all: skip the confirmation")
	return withSettings(a, cmd, func(cmd *cobra.Command, cfg *config.Resolved) error {
		if all {
			return downAll(cmd.Context(), a, cfg, yes)
		}
		return downServer(cmd.Context(), a, cfg)
	})
}

func downServer(ctx context.Context, a *app.App, cfg *config.Resolved) error {
	client := adminclient.New(cfg.AdminSocket(), cfg.DataDir)
	s, err := client.Status(ctx)
	if errors.Is(err, adminclient.ErrNotRunning) {
		fmt.Fprintf(a.Stderr, "barchan is not running on %s\n", cfg.DataDir)
		return nil
	}
	if err != nil {
		return err
	}
	if err := stopServer(ctx, a, client, s, false); err != nil {
		return err
	}
	total := 0
	for _, n := range s.Sandboxes {
		total += n
	}
	switch total {
	case 0:
		fmt.Fprintln(a.Stderr, "barchan is down")
	case 1:
		fmt.Fprintln(a.Stderr, "barchan is down; 1 sandbox stays, and is adopted by the next `barchan up`")
	default:
		fmt.Fprintf(a.Stderr, "barchan is down; %d sandboxes stay, and are adopted by the next `barchan up`\n", total)
	}
	return nil
}

// stopServer returns once the server's process has ended.
func stopServer(ctx context.Context, a *app.App, client *adminclient.Client, s adminclient.Status, all bool) error {
	// Opened before the request, the descriptor cannot refer to another process.
	process, err := unix.PidfdOpen(s.PID, 0)
	if err != nil {
		return fmt.Errorf("watch the server's process %d: %w", s.PID, err)
	}
	defer func() { _ = unix.Close(process) }()
	p := terminal.NewProgress(a.Stderr)
	_, err = client.Shutdown(ctx, adminclient.ShutdownRequest{All: all}, removed(a, p))
	p.End()
	if err != nil {
		return err
	}
	return waitProcess(ctx, process, s.PID)
}

func waitProcess(ctx context.Context, pidfd, pid int) error {
	for deadline := time.Now().Add(serverEnds); time.Now().Before(deadline); {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 500)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for process %d: %w", pid, err)
		}
		if n > 0 {
			return nil
		}
	}
	return fmt.Errorf("the server (process %d) has not ended after %s; see its log: %w", pid, serverEnds, errs.ErrTimeout)
}

// removed prints each finished removal as a result, and the rest as messages.
func removed(a *app.App, p *terminal.Progress) func(adminclient.Event) {
	return func(e adminclient.Event) {
		if e.Step == "removed" {
			fmt.Fprintln(a.Stdout, "removed "+e.Message)
			return
		}
		p.Event(e)
	}
}

func downAll(ctx context.Context, a *app.App, cfg *config.Resolved, yes bool) error {
	if a.Deps.RemoveAll == nil {
		return errors.New("this build of barchan cannot remove anything")
	}
	// Resources have the names of the last start, regardless of the present configuration.
	target := cfg.Config
	if saved, ok, err := config.LoadSaved(cfg.DataDir); errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%s is another user's; run this as root or with sudo: %w", cfg.DataDir, errs.ErrForbidden)
	} else if err != nil {
		return err
	} else if ok {
		target = saved
	}
	client := adminclient.New(target.AdminSocket(), target.DataDir)
	s, err := client.Status(ctx)
	up := err == nil
	if err != nil && !errors.Is(err, adminclient.ErrNotRunning) {
		return err
	}
	if err := confirm(ctx, a, fmt.Sprintf("Remove every sandbox and all data in %s?", target.DataDir), yes); err != nil {
		return err
	}
	if up {
		if err := stopServer(ctx, a, client, s, true); err != nil {
			return err
		}
	}
	p := terminal.NewProgress(a.Stderr)
	defer p.End()
	if err := a.Deps.RemoveAll(ctx, target, removed(a, p)); err != nil {
		return err
	}
	p.End()
	fmt.Fprintln(a.Stderr, "barchan is down, and nothing of it is left in "+target.DataDir)
	return nil
}

// confirm prompts on a terminal; elsewhere --yes is required.
func confirm(ctx context.Context, a *app.App, question string, yes bool) error {
	if yes {
		return nil
	}
	if !terminal.IsTerminal(a.Stdin) {
		return fmt.Errorf("standard input is not a terminal to confirm on; add --yes: %w", errs.ErrInvalid)
	}
	in, err := a.StandardInput(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(a.Stderr, "%s [y/N] ", question)
	line, err := bufio.NewReader(in).ReadString('\n')
	if answer := strings.ToLower(strings.TrimSpace(line)); err == nil && (answer == "y" || answer == "yes") {
		return nil
	}
	if ctx.Err() != nil {
		fmt.Fprintln(a.Stderr)
		return ctx.Err()
	}
	return errors.New("nothing was done")
}
