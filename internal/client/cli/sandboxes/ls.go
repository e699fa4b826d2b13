package sandboxes

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// LsCommand returns `barchan ls`.
func LsCommand(a *app.App) *cobra.Command {
	var o client.ListOptions
	var state string
	var metadata []string
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"ps", "list"},
		Short:   "List sandboxes",
		Long:    "List the sandboxes of the key's namespace, running and paused. Every command takes the ID or the NAME of one.",
		Example: "  barchan ls -o wide\n  barchan kill $(barchan ls -q --state paused)",
	}
	f := cmd.Flags()
	f.StringVar(&state, "state", "", "running or paused (default both)")
	f.StringArrayVar(&metadata, "metadata", nil, "only those with NAME=VALUE; given again, all must match")
	f.StringVar(&o.Template, "template", "", "only those of a template")
	f.IntVarP(&o.Limit, "limit", "n", 0, "greatest number to list, the newest first (default all)")
	a.ListFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch state {
		case "":
			o.States = app.AnyState()
		case client.StateRunning, client.StatePaused:
			o.States = []string{state}
		default:
			return app.Usage(cmd, fmt.Errorf("--state: %q is neither running nor paused", state))
		}
		if o.Limit < 0 {
			return app.Usage(cmd, fmt.Errorf("--limit: %d is negative", o.Limit))
		}
		var err error
		if o.Metadata, err = keyValues("--metadata", metadata); err != nil {
			return app.Usage(cmd, err)
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			list, err := t.REST.List(cmd.Context(), o)
			if err != nil {
				return err
			}
			return app.PrintList(a, sandboxColumns(), list)
		})
	}
	return cmd
}

func sandboxColumns() app.Columns[client.SandboxInfo] {
	return app.Columns[client.SandboxInfo]{
		Header: []string{"ID", "NAME", "TEMPLATE", "STATE", "AGE", "ENDS IN", "CPU", "MEMORY", "METADATA", "DISK", "TEMPLATE ID", "STARTED"},
		Wide:   3,
		None:   "no sandboxes; `barchan run --keep -- true` makes one",
		Row: func(s *client.SandboxInfo) []string {
			ends := terminal.Until(s.EndAt)
			if s.State == client.StatePaused { // a paused sandbox has no expiry
				ends = "-"
			}
			return []string{
				s.SandboxID, terminal.Dash(s.Name), terminal.Dash(cmp.Or(s.Alias, s.TemplateID)), s.State, terminal.Since(s.StartedAt), ends, fmt.Sprint(s.CPUCount),
				terminal.Size(s.MemoryMB << 20), terminal.Dash(terminal.Pairs(s.Metadata)), terminal.Size(s.DiskSizeMB << 20), terminal.Dash(s.TemplateID), s.StartedAt.UTC().Format(time.RFC3339),
			}
		},
	}
}

// ShowCommand returns `barchan show`.
func ShowCommand(a *app.App) *cobra.Command {
	return a.JSONFlag(&cobra.Command{
		Use:   "show SANDBOX",
		Short: "Show one sandbox",
		Long:  "Show one sandbox: what a running one uses, whether the memory of a paused one is in RAM or on Disk, and\nhow long each step of its start took.",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithServer(cmd.Context(), func(t *app.Server) error {
				return show(cmd.Context(), a, t, args[0])
			})
		},
	})
}

func show(ctx context.Context, a *app.App, t *app.Server, text string) error {
	d, err := t.Find(ctx, text)
	if err != nil {
		return err
	}
	d.AgentToken = "" // a secret that users do not need
	if a.JSON {
		return a.PrintJSON(d)
	}
	line := func(name, value string) { a.Field(12, name, value) }
	line("ID", d.SandboxID)
	line("Name", d.Name)
	line("State", d.State)
	memory := d.Memory
	if d.MemoryBytes > 0 {
		memory += ", " + terminal.Size(d.MemoryBytes)
	}
	line("Memory in", memory)
	line("Template", strings.TrimSpace(d.TemplateID+" "+d.Alias))
	line("Created by", d.CreatedByKey)
	line("Started", d.StartedAt.Local().Format("2006-01-02 15:04:05")+", "+terminal.Since(d.StartedAt)+" ago")
	if d.State == client.StateRunning {
		line("Ends", fmt.Sprintf("in %s, then %s", terminal.Until(d.EndAt), terminal.Dash(d.Lifecycle.OnTimeout)))
	}
	line("Limits", fmt.Sprintf("%d CPU, %s memory, %s disk", d.CPUCount, terminal.Size(d.MemoryMB<<20), terminal.Size(d.DiskSizeMB<<20)))
	for _, c := range d.Containers {
		line("Container", fmt.Sprintf("%s, %s, restarted %d times", c.Name, c.State, c.RestartCount))
	}
	line("Metadata", terminal.Pairs(d.Metadata))
	if d.Network != nil {
		line("Allow out", strings.Join(d.Network.AllowOut, " "))
		line("Deny out", strings.Join(d.Network.DenyOut, " "))
		if public := d.Network.AllowPublicTraffic; public != nil && !*public {
			line("Ports", "private: clients need the traffic token, or a URL of `barchan port --expires`")
		}
	}
	if d.State == client.StateRunning {
		showUse(ctx, a, t, d.SandboxID)
	}
	showOperations(a, d.Operations)
	return nil
}

// showOperations prints the steps of operations as a table.
func showOperations(a *app.App, all []client.Operation) {
	if len(all) == 0 {
		return
	}
	tab := terminal.NewTable("OPERATION", "AT", "STEP", "AFTER", "TOOK")
	for _, op := range all {
		tab.Add(op.Operation, op.StartedAt.Local().Format("2006-01-02 15:04:05"), "", "", fmt.Sprintf("%d ms", op.Milliseconds))
		for _, s := range op.Steps {
			tab.Add("", "", s.Name, fmt.Sprintf("%d ms", s.After), fmt.Sprintf("%d ms", s.Milliseconds))
		}
	}
	fmt.Fprintln(a.Stdout)
	tab.Write(a.Stdout)
}

// showUse prints what a running sandbox uses.
func showUse(ctx context.Context, a *app.App, t *app.Server, id string) {
	metrics, err := t.REST.Metrics(ctx, id)
	if err != nil || len(metrics) == 0 {
		return // usage is an extra; the sandbox may have ended meanwhile
	}
	m := metrics[len(metrics)-1]
	a.Field(12, "Uses", fmt.Sprintf("%.0f%% CPU, %s memory, %s disk", m.CPUUsedPct, terminal.Size(int64(m.MemUsed)), terminal.Size(int64(m.DiskUsed))))
}
