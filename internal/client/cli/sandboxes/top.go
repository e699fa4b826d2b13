package sandboxes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

const leastInterval = 500 * time.Millisecond

// use is what one running sandbox uses.
type use struct {
	SandboxID string        `json:"sandboxID"`
	Name      string        `json:"name,omitempty"`
	Template  string        `json:"template,omitempty"`
	StartedAt time.Time     `json:"startedAt"`
	Metric    client.Metric `json:"metrics"`
}

// orders are the values of --sort; the greatest is first.
var orders = map[string]func(a, b *use) int{
	"cpu":    func(a, b *use) int { return cmp.Compare(b.Metric.CPUUsedPct, a.Metric.CPUUsedPct) },
	"memory": func(a, b *use) int { return cmp.Compare(b.Metric.MemUsed, a.Metric.MemUsed) },
	"disk":   func(a, b *use) int { return cmp.Compare(b.Metric.DiskUsed, a.Metric.DiskUsed) },
	"age":    func(a, b *use) int { return a.StartedAt.Compare(b.StartedAt) },
}

// TopCommand returns `barchan top`.
func TopCommand(a *app.App) *cobra.Command {
	var o client.ListOptions
	var order string
	var once bool
	var every time.Duration
	cmd := &cobra.Command{
		Use: "top", Short: "Show what running sandboxes use",
		Long: "Show the CPU, memory and disk use of the running sandboxes of the key's namespace, the greatest first, and refresh\n" +
			"it until interrupted. A CPU of 100% is all CPUs of the sandbox. If the output is not a terminal, it is shown once.",
		Example: "  barchan top --sort memory -n 20\n  barchan top --once --json | jq '.[0].sandboxID'",
	}
	f := cmd.Flags()
	f.StringVar(&order, "sort", "cpu", "cpu, memory, disk or age")
	f.StringVar(&o.Template, "template", "", "only those of a template")
	f.IntVarP(&o.Limit, "limit", "n", 0, "greatest number of rows (default as many as fit, or all)")
	f.DurationVar(&every, "interval", 2*time.Second, "time between two looks, at least 500ms")
	f.BoolVar(&once, "once", false, "show it once")
	a.ListFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		by, ok := orders[order]
		switch {
		case !ok:
			return app.Usage(cmd, fmt.Errorf("--sort: %q is none of cpu, memory, disk and age", order))
		case o.Limit < 0:
			return app.Usage(cmd, fmt.Errorf("--limit: %d is negative", o.Limit))
		case every < leastInterval:
			return app.Usage(cmd, errors.New("--interval: want 500ms or more"))
		}
		rows := o.Limit
		o.Limit, o.States = 0, []string{client.StateRunning}
		live := !once && a.Format == "" && terminal.IsTerminal(a.Stdout)
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			for {
				all, err := uses(cmd.Context(), t.REST, o)
				if err != nil {
					return err
				}
				slices.SortStableFunc(all, func(x, y use) int { return by(&x, &y) })
				shown := all[:min(len(all), cmp.Or(rows, len(all)))]
				if !live {
					return app.PrintList(a, useColumns(), shown)
				}
				if height := terminal.Height(a.Stdout); rows == 0 && height > 4 {
					shown = all[:min(len(all), height-4)]
				}
				if err := draw(a, all, shown); err != nil {
					return err
				}
				if !lifecycle.Sleep(cmd.Context(), every) {
					return context.Cause(cmd.Context())
				}
			}
		})
	}
	return cmd
}

// uses lists the running sandboxes that have been measured. One that ends meanwhile is left out.
func uses(ctx context.Context, c *client.Client, o client.ListOptions) ([]use, error) {
	list, err := c.List(ctx, o)
	if err != nil {
		return nil, err
	}
	ids := make([]string, len(list))
	for i := range list {
		ids[i] = list[i].SandboxID
	}
	measured, err := c.MetricsOf(ctx, ids)
	if err != nil {
		return nil, err
	}
	all := []use{}
	for i := range list {
		s := &list[i]
		if m, ok := measured[s.SandboxID]; ok {
			all = append(all, use{s.SandboxID, s.Name, cmp.Or(s.Alias, s.TemplateID), s.StartedAt, m})
		}
	}
	return all, nil
}

func useColumns() app.Columns[use] {
	of := func(used, total uint64) string {
		return terminal.Size(int64(used)) + " / " + terminal.Size(int64(total))
	}
	return app.Columns[use]{
		Header: []string{"ID", "NAME", "TEMPLATE", "CPU", "MEMORY", "DISK", "AGE", "CPUS"}, Wide: 1, None: "no running sandboxes",
		Row: func(u *use) []string {
			m := &u.Metric
			return []string{
				u.SandboxID, terminal.Dash(u.Name), u.Template, fmt.Sprintf("%.1f%%", m.CPUUsedPct),
				of(m.MemUsed, m.MemTotal), of(m.DiskUsed, m.DiskTotal), terminal.Since(u.StartedAt), fmt.Sprint(m.CPUCount),
			}
		},
	}
}

// draw replaces what the terminal shows.
func draw(a *app.App, all, shown []use) error {
	var sum client.Metric
	for i := range all {
		m := &all[i].Metric
		sum.CPUUsedPct += m.CPUUsedPct * float64(m.CPUCount) / 100
		sum.MemUsed, sum.DiskUsed = sum.MemUsed+m.MemUsed, sum.DiskUsed+m.DiskUsed
	}
	_, err := fmt.Fprintf(a.Stdout, "\x1b[H\x1b[2J%s   %d running   %.2f CPUs   %s memory   %s disk\n\n",
		time.Now().Format(time.TimeOnly), len(all), sum.CPUUsedPct, terminal.Size(int64(sum.MemUsed)), terminal.Size(int64(sum.DiskUsed)))
	if err != nil {
		return err
	}
	return app.PrintList(a, useColumns(), shown)
}
