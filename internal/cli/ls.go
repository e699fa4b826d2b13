package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/restclient"
)

func (a *app) lsCommand() *cobra.Command {
	var o restclient.ListOptions
	var state string
	var metadata []string
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List sandboxes",
		Args:  exactly(),
	}
	f := cmd.Flags()
	f.StringVar(&state, "state", "", "running or paused (default both)")
	f.StringArrayVar(&metadata, "metadata", nil, "only those with NAME=VALUE; given again, all must match")
	f.StringVar(&o.Template, "template", "", "only those of a template")
	f.IntVarP(&o.Limit, "limit", "n", 0, "at most so many, the newest first (default all)")
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch state {
		case "":
			o.States = []string{restclient.StateRunning, restclient.StatePaused}
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
			if a.json {
				return a.printJSON(list)
			}
			a.printSandboxes(list)
			return nil
		})
	}
	return cmd
}

func (a *app) printSandboxes(list []restclient.Listed) {
	if len(list) == 0 {
		fmt.Fprintln(a.stderr, "no sandboxes; `barchan run --keep -- true` makes one")
		return
	}
	tab := newTable("ID", "TEMPLATE", "STATE", "AGE", "ENDS IN", "CPU", "MEMORY", "METADATA")
	tab.colour = a.stateColours(2)
	for _, s := range list {
		name := s.TemplateID
		if s.Alias != "" {
			name = s.Alias
		}
		ends := left(s.EndAt)
		if s.State == restclient.StatePaused { // it sleeps for as long as it takes
			ends = "-"
		}
		tab.add(s.SandboxID, name, s.State, since(s.StartedAt), ends,
			fmt.Sprint(s.CPUCount), size(s.MemoryMB<<20), pairs(s.Metadata))
	}
	tab.write(a.stdout)
}

func (a *app) showCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show one sandbox",
		Args:  exactly("ID"),
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
	id, err := t.resolve(ctx, text)
	if err != nil {
		return err
	}
	d, err := t.rest.Get(ctx, id)
	if err != nil {
		return err
	}
	d.AgentToken = "" // a secret, and of no use to people
	if a.json {
		return a.printJSON(d)
	}
	line := func(name, value string) {
		if value != "" {
			fmt.Fprintf(a.stdout, "%-12s %s\n", name, value)
		}
	}
	line("ID", d.SandboxID)
	line("State", d.State)
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
	metrics, err := t.rest.Metrics(ctx, id)
	if err != nil || len(metrics) == 0 {
		return nil //nolint:nilerr // usage is an extra; the sandbox may have ended meanwhile
	}
	m := metrics[len(metrics)-1]
	line("Uses", fmt.Sprintf("%.0f%% CPU, %s memory, %s disk", m.CPUUsedPct, size(int64(m.MemUsed)), size(int64(m.DiskUsed))))
	return nil
}
