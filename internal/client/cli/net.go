package cli

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
)

func (a *app) netCommand() *cobra.Command {
	return nounCommand("net", "Addresses of sandboxes, and what they may reach",
		a.netLeasesCommand(), a.netSubnetsCommand(), a.netReleaseCommand(), a.netCheckCommand(), a.netTraceCommand())
}

// leaseStates are the values of --state.
func leaseStates() []string { return []string{"reserved", "held", "quarantined", "cooling"} }

func (a *app) netLeasesCommand() *cobra.Command {
	var state string
	cmd := &cobra.Command{
		Use:   "leases",
		Short: "List the addresses that are not free",
		Long: "List the addresses that are not free: reserved for a sandbox in the making, held by one that lives, cooling after\n" +
			"use, or quarantined because somebody unknown was found to use it. Quarantined ones stay so until `barchan net release`,\n" +
			"or until a sandbox is found to be the one that uses it.",
		Args: exactly(),
	}
	cmd.Flags().StringVar(&state, "state", "", "only those in this `state`: "+strings.Join(leaseStates(), ", "))
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if state != "" && !slices.Contains(leaseStates(), state) {
			return &usageError{cmd, fmt.Errorf("--state: %q is none of %s", state, strings.Join(leaseStates(), ", "))}
		}
		client, err := a.admin()
		if err != nil {
			return err
		}
		leases, err := client.Leases(cmd.Context())
		if err != nil {
			return err
		}
		return a.printLeases(slices.DeleteFunc(leases, func(l adminclient.Lease) bool { return state != "" && l.State != state }))
	}
	return cmd
}

func (a *app) printLeases(leases []adminclient.Lease) error {
	if a.json {
		return a.printJSON(leases)
	}
	tab := newTable("ADDRESS", "STATE", "SANDBOX", "NAME", "FOR", "NOTE")
	for _, l := range leases {
		address, note := l.Address.String(), l.Reason
		if l.Address6.IsValid() {
			address += ", " + l.Address6.String()
		}
		if !l.Until.IsZero() {
			note = "free in " + left(l.Until)
		}
		tab.add(address, l.State, dash(l.Sandbox), dash(l.Name), since(l.Since), note)
	}
	tab.write(a.stdout)
	return nil
}

func (a *app) netSubnetsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "subnets",
		Short: "Count addresses by what they are doing",
		Long: "Count the addresses of each subnet by what they are doing. Addresses are handed out from the first; leases of others\n" +
			"are of before the setting was changed. 0.0.0.0/0 stands for what is of no known subnet.",
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := a.admin()
			if err != nil {
				return err
			}
			subnets, err := client.Subnets(cmd.Context())
			if err != nil {
				return err
			}
			return a.printSubnets(subnets)
		},
	}
	a.jsonFlag(cmd)
	return cmd
}

func (a *app) printSubnets(subnets []adminclient.Subnet) error {
	if a.json {
		return a.printJSON(subnets)
	}
	tab := newTable("SUBNET", "TOTAL", "FREE", "RESERVED", "HELD", "COOLING", "QUARANTINED", "UNREAD", "EXCLUDED")
	for _, s := range subnets {
		name := s.Subnet.String()
		if s.Subnet6.IsValid() {
			name += ", " + s.Subnet6.String()
		}
		total, free, excluded := strconv.Itoa(s.Total), strconv.Itoa(s.Free), strconv.Itoa(s.Excluded)
		if !s.Current {
			total, free, excluded = "-", "-", "-"
		}
		tab.add(name, total, free, strconv.Itoa(s.Reserved), strconv.Itoa(s.Held), strconv.Itoa(s.Cooling),
			strconv.Itoa(s.Quarantined), strconv.Itoa(s.Unread), excluded)
	}
	tab.write(a.stdout)
	return nil
}

func (a *app) netReleaseCommand() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "release ADDRESS",
		Short: "End the quarantine of an address",
		Long: "End the quarantine of an address, once whoever used it is gone. It cools down, and may then be handed out again.\n" +
			"An address that a sandbox has is refused, and who has it is told: kill the sandbox instead.",
		Args: exactly("ADDRESS"),
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		addr, err := netip.ParseAddr(args[0])
		if err != nil {
			return &usageError{cmd, fmt.Errorf("ADDRESS: %w", err)}
		}
		client, err := a.admin()
		if err != nil {
			return err
		}
		if err := a.confirm(cmd.Context(), fmt.Sprintf("Have %s handed out again, to any sandbox?", addr), yes); err != nil {
			return err
		}
		if err := client.FreeAddress(cmd.Context(), addr); err != nil {
			return err
		}
		fmt.Fprintln(a.stdout, addr)
		return nil
	}
	return cmd
}

func (a *app) netCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Compare the books of addresses with what is live, now",
		Long: "Compare the books of addresses with what is live, as the server does every 5 minutes, and repair what differs:\n" +
			"an address in use that is free in the books is reserved again, and one that somebody unknown uses is quarantined;\n" +
			"a lease whose owner was missed by three looks, minutes apart, is released. Nothing is taken from what lives:\n" +
			"an address that another than its owner uses is a conflict, which a person must end. The exit code is then 1.",
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := a.admin()
			if err != nil {
				return err
			}
			repairs, err := client.CheckAddresses(cmd.Context())
			if err != nil {
				return err
			}
			return a.printRepairs(repairs)
		},
	}
	a.jsonFlag(cmd)
	return cmd
}

func (a *app) printRepairs(repairs []adminclient.Repair) error {
	switch {
	case a.json:
		if err := a.printJSON(repairs); err != nil {
			return err
		}
	case len(repairs) == 0:
		fmt.Fprintln(a.stderr, "books and machine agree")
	default:
		tab := newTable("ADDRESS", "WHAT", "SANDBOX", "SEEN", "DETAIL")
		for _, r := range repairs {
			tab.add(r.Address.String(), r.Kind, dash(r.Sandbox), dash(r.Where), r.Detail)
		}
		tab.write(a.stdout)
	}
	conflicts := 0
	for _, r := range repairs {
		if r.Kind == adminclient.RepairConflict {
			conflicts++
		}
	}
	if conflicts > 0 {
		fmt.Fprintf(a.stderr, "barchan: %d in conflict; nothing was taken from anybody: kill one of the sandboxes, or what else uses the address\n", conflicts)
		return exitCode(exitError)
	}
	return nil
}

func (a *app) netTraceCommand() *cobra.Command {
	req := adminclient.TraceRequest{}
	cmd := &cobra.Command{
		Use:     "trace SANDBOX DESTINATION",
		Short:   "Say which rule decides about what a sandbox sends",
		Long:    "Say whether a sandbox may reach an address or a domain name, and which rule decides. Nothing is sent.",
		Example: "  barchan net trace iaaa0000000000000001 example.com --port 443",
		Args:    exactly("SANDBOX", "DESTINATION"),
	}
	cmd.Flags().Uint16Var(&req.Port, "port", 443, "port of the destination")
	cmd.Flags().StringVar(&req.Protocol, "protocol", "tcp", "`protocol`: tcp, udp or another by its name")
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if req.Protocol = strings.ToLower(req.Protocol); req.Protocol == "" {
			return &usageError{cmd, errors.New("--protocol: is empty")}
		}
		client, err := a.admin()
		if err != nil {
			return err
		}
		if req.Sandbox, err = a.localSandbox(cmd.Context(), args[0]); err != nil {
			return err
		}
		req.Destination = args[1]
		trace, err := client.TraceEgress(cmd.Context(), req)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(trace)
		}
		fmt.Fprintf(a.stdout, "%s: %s\n", trace.Verdict, trace.Rule)
		return nil
	}
	return cmd
}

// localSandbox returns a sandbox's whole ID. Only a prefix needs the REST API.
func (a *app) localSandbox(ctx context.Context, text string) (id string, err error) {
	if id, err := sandbox.ParseID(text); err == nil {
		return string(id), nil
	}
	err = a.withTarget(ctx, func(t *target) (err error) {
		id, err = t.resolve(ctx, text)
		return err
	})
	return id, err
}
