package cli

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/adminclient"
)

func (a *app) statusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show how the server is",
		Args:  exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := a.admin()
			if err != nil {
				return err
			}
			s, err := client.Status(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(s)
			}
			a.printStatus(s)
			return nil
		},
	}
	a.jsonFlag(cmd)
	return cmd
}

func (a *app) printStatus(s adminclient.Status) {
	state := s.Phase
	if s.Ready {
		state = "ready"
	}
	line := func(name, value string) {
		if value != "" {
			fmt.Fprintf(a.stdout, "%-12s %s\n", name, value)
		}
	}
	if a.coloured(a.stdout) {
		state = paint(map[bool]string{true: green, false: yellow}[s.Ready], state)
	}
	line("State", state)
	line("Version", s.Version)
	line("Process", strconv.Itoa(s.PID)+", up "+since(s.StartedAt))
	line("Node", s.Node)
	line("Data", s.DataDir)
	line("HTTP", "http://"+s.Addresses.HTTP)
	if s.Addresses.TLS != "" {
		line("TLS", "https://"+s.Addresses.TLS+", domain "+s.Addresses.Domain)
	}
	line("Kubernetes", "https://"+s.Addresses.Kube+", kubeconfig "+s.Addresses.Kubeconfig)
	line("Sandboxes", counts(s.Sandboxes))
	for _, c := range s.Components {
		line(c.Name, strings.TrimSpace(c.Version+" "+c.State+" "+c.Path))
	}
	if !s.Ready {
		for _, p := range s.Phases {
			took := "…"
			if p.Done {
				took = milli(p.Milli)
			}
			line("Phase", p.Name+" "+took)
		}
	}
}

func counts(m map[string]int) string {
	var out []string
	for phase, n := range m {
		if n > 0 {
			out = append(out, fmt.Sprintf("%d %s", n, strings.ToLower(phase)))
		}
	}
	if len(out) == 0 {
		return "none"
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}
