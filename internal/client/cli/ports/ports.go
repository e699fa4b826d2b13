package ports

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// PortsCommand returns `barchan ports`.
func PortsCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ports SANDBOX",
		Short: "List the ports that programs in a sandbox listen on",
		Long: "List the TCP ports that programs in a sandbox listen on, with the address that each is bound to.\n" +
			"The gateway reaches all of them, those on 127.0.0.1 and ::1 too; `barchan port SANDBOX PORT` prints the URL of one.",
		Args: app.Exactly("SANDBOX"),
	}
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		return a.WithServer(ctx, func(t *app.Server) error {
			on, err := t.Running(ctx, args[0], "")
			if err != nil {
				return err
			}
			list, err := on.Client.Ports(ctx)
			if err != nil {
				return fmt.Errorf("list ports: %w", on.Lost(ctx, err))
			}
			if a.JSON {
				return a.PrintJSON(list)
			}
			printPorts(a, list)
			return nil
		})
	}
	return cmd
}

func printPorts(a *app.App, list []envd.ListeningPort) {
	if len(list) == 0 {
		fmt.Fprintln(a.Stderr, "nothing listens in the sandbox")
		return
	}
	tab := terminal.NewTable("PORT", "ADDRESS", "PID", "PROCESS")
	for _, p := range list {
		pid, name := "-", "-"
		if p.PID != 0 {
			pid, name = strconv.Itoa(p.PID), p.Process
		}
		tab.Add(strconv.Itoa(int(p.Port)), p.Address, pid, name)
	}
	tab.Write(a.Stdout)
}
