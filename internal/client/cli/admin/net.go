package admin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// NetCommand returns `barchan net`.
func NetCommand(a *app.App) *cobra.Command {
	return app.NounCommand("net", "Addresses of sandboxes, and what they may reach",
		netLeasesCommand(a), netSubnetsCommand(a), netReleaseCommand(a), netCheckCommand(a), netTraceCommand(a))
}

// LeaseStates are the values of --state.
func LeaseStates() []string { return []string{"reserved", "held", "quarantined", "cooling"} }

func netLeasesCommand(a *app.App) *cobra.Command {
	var state string
	cmd := &cobra.Command{
		Use:   "leases",
		Short: "List the addresses that are not free",
		Long: "List the addresses that are not free: reserved for a sandbox that is being created, held by one that exists, cooling\n" +
			"after use, or quarantined because an unknown program uses them. A quarantined address stays so until\n" +
			"`barchan net release`, or until the sandbox that uses it is found.",
	}
	cmd.Flags().StringVar(&state, "state", "", "only those in this `state`: "+strings.Join(LeaseStates(), ", "))
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if state != "" && !slices.Contains(LeaseStates(), state) {
			return app.Usage(cmd, fmt.Errorf("--state: %q is none of %s", state, strings.Join(LeaseStates(), ", ")))
		}
		return show(a, func(c *adminclient.Client, ctx context.Context) ([]adminclient.Lease, error) {
			leases, err := c.Leases(ctx)
			return slices.DeleteFunc(leases, func(l adminclient.Lease) bool { return state != "" && l.State != state }), err
		}, printLeases)(cmd, nil)
	}
	return cmd
}

func printLeases(a *app.App, leases []adminclient.Lease) {
	tab := terminal.NewTable("ADDRESS", "STATE", "SANDBOX", "NAME", "FOR", "NOTE")
	for _, l := range leases {
		address, note := l.Address.String(), l.Reason
		if l.Address6.IsValid() {
			address += ", " + l.Address6.String()
		}
		if !l.Until.IsZero() {
			note = "free in " + terminal.Until(l.Until)
		}
		tab.Add(address, l.State, terminal.Dash(l.Sandbox), terminal.Dash(l.Name), terminal.Since(l.Since), note)
	}
	tab.Write(a.Stdout)
}

func netSubnetsCommand(a *app.App) *cobra.Command {
	return a.JSONFlag(&cobra.Command{
		Use:   "subnets",
		Short: "Count addresses by state",
		Long: "Count the addresses of each subnet by state. Addresses are allocated from the first subnet; leases in others are from\n" +
			"before the setting was changed. 0.0.0.0/0 stands for addresses of no known subnet.",
		RunE: show(a, (*adminclient.Client).Subnets, printSubnets),
	})
}

func printSubnets(a *app.App, subnets []adminclient.Subnet) {
	tab := terminal.NewTable("SUBNET", "TOTAL", "FREE", "RESERVED", "HELD", "COOLING", "QUARANTINED", "UNREAD", "EXCLUDED")
	for _, s := range subnets {
		name := s.Subnet.String()
		if s.Subnet6.IsValid() {
			name += ", " + s.Subnet6.String()
		}
		total, free, excluded := strconv.Itoa(s.Total), strconv.Itoa(s.Free), strconv.Itoa(s.Excluded)
		if !s.Current {
			total, free, excluded = "-", "-", "-"
		}
		tab.Add(name, total, free, strconv.Itoa(s.Reserved), strconv.Itoa(s.Held), strconv.Itoa(s.Cooling),
			strconv.Itoa(s.Quarantined), strconv.Itoa(s.Unread), excluded)
	}
	tab.Write(a.Stdout)
}

func netReleaseCommand(a *app.App) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "release ADDRESS",
		Short: "End the quarantine of an address",
		Long: "End the quarantine of an address, once the program that used it is gone. It cools down, and can then be allocated\n" +
			"again. The address of a sandbox is refused, with the sandbox's name: kill that instead.",
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "skip the confirmation")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		addr, err := netip.ParseAddr(args[0])
		if err != nil {
			return app.Usage(cmd, fmt.Errorf("ADDRESS: %q is not an IP address", args[0]))
		}
		client, err := a.Admin()
		if err != nil {
			return err
		}
		if err := confirm(cmd.Context(), a, fmt.Sprintf("Allow %s to be allocated again, to any sandbox?", addr), yes); err != nil {
			return err
		}
		if err := client.FreeAddress(cmd.Context(), addr); err != nil {
			return err
		}
		fmt.Fprintln(a.Stdout, addr)
		return nil
	}
	return cmd
}

func netCheckCommand(a *app.App) *cobra.Command {
	return a.JSONFlag(&cobra.Command{
		Use:   "check",
		Short: "Compare the address leases with what is in use, now",
		Long: "Compare the address leases with what is in use, as the server does every 5 minutes, and repair differences:\n" +
			"an address in use without a lease is reserved again, or quarantined if its user is unknown; a lease whose owner\n" +
			"was absent in three scans, minutes apart, is released. No address in use is taken away: if another than its owner\n" +
			"uses it, that is a conflict, which a person must end. The exit code is then 1.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithAdmin(func(c *adminclient.Client) error {
				repairs, err := c.CheckAddresses(cmd.Context())
				if err != nil {
					return err
				}
				return printRepairs(a, repairs)
			})
		},
	})
}

func printRepairs(a *app.App, repairs []adminclient.Repair) error {
	switch {
	case a.JSON:
		if err := a.PrintJSON(repairs); err != nil {
			return err
		}
	case len(repairs) == 0:
		fmt.Fprintln(a.Stderr, "leases and machine agree")
	default:
		tab := terminal.NewTable("ADDRESS", "WHAT", "SANDBOX", "SEEN", "DETAIL")
		for _, r := range repairs {
			tab.Add(r.Address.String(), r.Kind, terminal.Dash(r.Sandbox), terminal.Dash(r.Where), r.Detail)
		}
		tab.Write(a.Stdout)
	}
	conflicts := 0
	for _, r := range repairs {
		if r.Kind == adminclient.RepairConflict {
			conflicts++
		}
	}
	if conflicts > 0 {
		fmt.Fprintf(a.Stderr, "barchan: %d in conflict; no address was taken away: kill one of the sandboxes, or the other program that uses the address\n", conflicts)
		return app.ExitCode(app.CodeError)
	}
	return nil
}

func netTraceCommand(a *app.App) *cobra.Command {
	req := adminclient.TraceRequest{}
	cmd := &cobra.Command{
		Use:     "trace SANDBOX DESTINATION",
		Short:   "Show which rule decides about a sandbox's traffic",
		Long:    "Show whether a sandbox may reach an address or a domain name, and which rule decides. Nothing is sent.",
		Example: "  barchan net trace iaaa0000000000000001 example.com --port 443",
	}
	cmd.Flags().Uint16Var(&req.Port, "port", 443, "port of the destination")
	cmd.Flags().StringVar(&req.Protocol, "protocol", "tcp", "`protocol`: tcp, udp or another by its name")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if req.Protocol = strings.ToLower(req.Protocol); req.Protocol == "" {
			return app.Usage(cmd, errors.New("--protocol: is empty"))
		}
		client, err := a.Admin()
		if err != nil {
			return err
		}
		if req.Sandbox, err = localSandbox(cmd.Context(), a, args[0]); err != nil {
			return err
		}
		req.Destination = args[1]
		trace, err := client.TraceEgress(cmd.Context(), req)
		if err != nil {
			return err
		}
		return a.Result(trace, trace.Verdict+": "+trace.Rule)
	}
	return cmd
}

// localSandbox returns a sandbox's whole ID. Only a prefix needs the REST API.
func localSandbox(ctx context.Context, a *app.App, text string) (id string, err error) {
	if id, err := sandbox.ParseID(text); err == nil {
		return string(id), nil
	}
	err = a.WithServer(ctx, func(t *app.Server) (err error) {
		id, err = t.Resolve(ctx, text)
		return err
	})
	return id, err
}
