package cli

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

func (a *app) portsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ports SANDBOX",
		Short: "List the ports that programs in a sandbox listen on",
		Long: "List the TCP ports that programs in a sandbox listen on, with the address that each is bound to.\n" +
			"The gateway reaches all of them, those on 127.0.0.1 and ::1 too; `barchan port SANDBOX PORT` prints the URL of one.",
		Args: exactly("SANDBOX"),
	}
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		return a.withTarget(ctx, func(t *target) error {
			on, err := t.running(ctx, args[0], "")
			if err != nil {
				return err
			}
			list, err := on.client.Ports(ctx)
			if err != nil {
				return fmt.Errorf("list ports: %w", on.lost(ctx, err))
			}
			if a.json {
				return a.printJSON(list)
			}
			a.printPorts(list)
			return nil
		})
	}
	return cmd
}

func (a *app) printPorts(list []envd.ListeningPort) {
	if len(list) == 0 {
		fmt.Fprintln(a.stderr, "nothing listens in the sandbox")
		return
	}
	tab := newTable("PORT", "ADDRESS", "PID", "PROCESS")
	for _, p := range list {
		pid, name := "-", "-"
		if p.PID != 0 {
			pid, name = strconv.Itoa(p.PID), p.Process
		}
		tab.add(strconv.Itoa(int(p.Port)), p.Address, pid, name)
	}
	tab.write(a.stdout)
}
