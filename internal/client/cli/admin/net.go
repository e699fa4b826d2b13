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
		Long: "List the addresses that are not free: reserved for a sandbox in the making, held by one that lives, cooling after\n" +
			"use, or quarantined because somebody unknown was found to use it. Quarantined ones stay so until `barchan net release`,\n" +
			"or until a sandbox is found to be the one that uses it.",
		Args: app.Exactly(),
	}
	cmd.Flags().StringVar(&state, "state", "", "only those in this `state`: "+strings.Join(LeaseStates(), ", "))
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if state != "" && !slices.Contains(LeaseStates(), state) {
			return app.Usage(cmd, fmt.Errorf("--state: %q is none of %s", state, strings.Join(LeaseStates(), ", ")))
		}
		client, err := a.Admin()
		if err != nil {
			return err
		}
		leases, err := client.Leases(cmd.Context())
		if err != nil {
			return err
		}
		return printLeases(a, slices.DeleteFunc(leases, func(l adminclient.Lease) bool { return state != "" && l.State != state }))
	}
	return cmd
}

func printLeases(a *app.App, leases []adminclient.Lease) error {
	if a.JSON {
		return a.PrintJSON(leases)
	}
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
	return nil
}

func netSubnetsCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "subnets",
		Short: "Count addresses by what they are doing",
		Long: "Count the addresses of each subnet by what they are doing. Addresses are handed out from the first; leases of others\n" +
			"are of before the setting was changed. 0.0.0.0/0 stands for what is of no known subnet.",
		Args: app.Exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := a.Admin()
			if err != nil {
				return err
			}
			subnets, err := client.Subnets(cmd.Context())
			if err != nil {
				return err
			}
			return printSubnets(a, subnets)
		},
	}
	a.JSONFlag(cmd)
	return cmd
}

func printSubnets(a *app.App, subnets []adminclient.Subnet) error {
	if a.JSON {
		return a.PrintJSON(subnets)
	}
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
	return nil
}

func netReleaseCommand(a *app.App) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "release ADDRESS",
		Short: "End the quarantine of an address",
		Long: "End the quarantine of an address, once whoever used it is gone. It cools down, and may then be handed out again.\n" +
			"An address that a sandbox has is refused, and who has it is told: kill the sandbox instead.",
		Args: app.Exactly("ADDRESS"),
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		addr, err := netip.ParseAddr(args[0])
		if err != nil {
			return app.Usage(cmd, fmt.Errorf("ADDRESS: %w", err))
		}
		client, err := a.Admin()
		if err != nil {
			return err
		}
		if err := confirm(cmd.Context(), a, fmt.Sprintf("Have %s handed out again, to any sandbox?", addr), yes); err != nil {
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
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Compare the books of addresses with what is live, now",
		Long: "Compare the books of addresses with what is live, as the server does every 5 minutes, and repair what differs:\n" +
			"an address in use that is free in the books is reserved again, and one that somebody unknown uses is quarantined;\n" +
			"a lease whose owner was missed by three looks, minutes apart, is released. Nothing is taken from what lives:\n" +
			"an address that another than its owner uses is a conflict, which a person must end. The exit code is then 1.",
		Args: app.Exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := a.Admin()
			if err != nil {
				return err
			}
			repairs, err := client.CheckAddresses(cmd.Context())
			if err != nil {
				return err
			}
			return printRepairs(a, repairs)
		},
	}
	a.JSONFlag(cmd)
	return cmd
}

func printRepairs(a *app.App, repairs []adminclient.Repair) error {
	switch {
	case a.JSON:
		if err := a.PrintJSON(repairs); err != nil {
			return err
		}
	case len(repairs) == 0:
		fmt.Fprintln(a.Stderr, "books and machine agree")
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
		fmt.Fprintf(a.Stderr, "barchan: %d in conflict; nothing was taken from anybody: kill one of the sandboxes, or what else uses the address\n", conflicts)
		return app.ExitCode(app.CodeError)
	}
	return nil
}

func netTraceCommand(a *app.App) *cobra.Command {
	req := adminclient.TraceRequest{}
	cmd := &cobra.Command{
		Use:     "trace SANDBOX DESTINATION",
		Short:   "Say which rule decides about what a sandbox sends",
		Long:    "Say whether a sandbox may reach an address or a domain name, and which rule decides. Nothing is sent.",
		Example: "  barchan net trace iaaa0000000000000001 example.com --port 443",
		Args:    app.Exactly("SANDBOX", "DESTINATION"),
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
		if a.JSON {
			return a.PrintJSON(trace)
		}
		fmt.Fprintf(a.Stdout, "%s: %s\n", trace.Verdict, trace.Rule)
		return nil
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
