package cli

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/restclient"
)

func (a *app) lsCommand() *cobra.Command {
	var o restclient.ListOptions
	var state string
	var metadata []string
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"ps", "list"},
		Short:   "List sandboxes",
		Long:    "List the sandboxes of the key's namespace, running and paused. Every command takes the ID or the NAME of one.",
		Example: "  barchan ls -o wide\n  barchan kill $(barchan ls -q --state paused)",
		Args:    exactly(),
	}
	f := cmd.Flags()
	f.StringVar(&state, "state", "", "running or paused (default both)")
	f.StringArrayVar(&metadata, "metadata", nil, "only those with NAME=VALUE; given again, all must match")
	f.StringVar(&o.Template, "template", "", "only those of a template")
	f.IntVarP(&o.Limit, "limit", "n", 0, "at most so many, the newest first (default all)")
	a.listFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch state {
		case "":
			o.States = anyState()
		case restclient.StateRunning, restclient.StatePaused:
			o.States = []string{state}
		default:
			return &usageError{cmd, fmt.Errorf("--state: %q is neither running nor paused", state)}
		}
		if o.Limit < 0 {
			return &usageError{cmd, fmt.Errorf("--limit: %d is negative", o.Limit)}
		}
		var err error
		if o.Metadata, err = keyValues("--metadata", metadata); err != nil {
			return &usageError{cmd, err}
		}
		return a.withTarget(cmd.Context(), func(t *target) error {
			list, err := t.rest.List(cmd.Context(), o)
			if err != nil {
				return err
			}
			return printList(a, sandboxColumns(), list)
		})
	}
	return cmd
}

func sandboxColumns() columns[restclient.Listed] {
	return columns[restclient.Listed]{
		header: []string{"ID", "NAME", "TEMPLATE", "STATE", "AGE", "ENDS IN", "CPU", "MEMORY", "METADATA", "DISK", "TEMPLATE ID", "STARTED"},
		wide:   3,
		none:   "no sandboxes; `barchan run --keep -- true` makes one",
		row: func(s *restclient.Listed) []string {
			ends := left(s.EndAt)
			if s.State == restclient.StatePaused { // a paused sandbox has no expiry
				ends = "-"
			}
			return []string{
				s.SandboxID, dash(s.Name), cmp.Or(s.Alias, s.TemplateID), s.State, since(s.StartedAt), ends, fmt.Sprint(s.CPUCount),
				size(s.MemoryMB << 20), dash(pairs(s.Metadata)), size(s.DiskSizeMB << 20), dash(s.TemplateID), s.StartedAt.UTC().Format(time.RFC3339),
			}
		},
	}
}

func (a *app) showCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show SANDBOX",
		Short: "Show one sandbox",
		Long:  "Show one sandbox: what a running one uses, and whether the memory of a paused one is in RAM or on Disk.",
		Args:  exactly("SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withTarget(cmd.Context(), func(t *target) error {
				return a.show(cmd.Context(), t, args[0])
			})
		},
	}
	a.jsonFlag(cmd)
	return cmd
}

func (a *app) show(ctx context.Context, t *target, text string) error {
	d, err := t.find(ctx, text)
	if err != nil {
		return err
	}
	d.AgentToken = "" // a secret that users do not need
	if a.json {
		return a.printJSON(d)
	}
	line := func(name, value string) { a.field(12, name, value) }
	line("ID", d.SandboxID)
	line("Name", d.Name)
	line("State", d.State)
	line("Memory in", d.Memory)
	line("Template", strings.TrimSpace(d.TemplateID+" "+d.Alias))
	line("Started", d.StartedAt.Local().Format("2006-01-02 15:04:05")+", "+since(d.StartedAt)+" ago")
	if d.State == restclient.StateRunning {
		line("Ends", fmt.Sprintf("in %s, then %s", left(d.EndAt), dash(d.Lifecycle.OnTimeout)))
	}
	line("Limits", fmt.Sprintf("%d CPU, %s memory, %s disk", d.CPUCount, size(d.MemoryMB<<20), size(d.DiskSizeMB<<20)))
	line("Metadata", pairs(d.Metadata))
	if d.Network != nil {
		line("Allow out", strings.Join(d.Network.AllowOut, " "))
		line("Deny out", strings.Join(d.Network.DenyOut, " "))
	}
	if d.State != restclient.StateRunning {
		return nil
	}
	metrics, err := t.rest.Metrics(ctx, d.SandboxID)
	if err != nil || len(metrics) == 0 {
		return nil //nolint:nilerr // usage is an extra; the sandbox may have ended meanwhile
	}
	m := metrics[len(metrics)-1]
	line("Uses", fmt.Sprintf("%.0f%% CPU, %s memory, %s disk", m.CPUUsedPct, size(int64(m.MemUsed)), size(int64(m.DiskUsed))))
	return nil
}
