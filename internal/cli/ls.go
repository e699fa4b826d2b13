package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/restclient"
	"github.com/barchan-dev/barchan/internal/sandbox"
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
		Long:  "Show one sandbox: of one that runs what it uses, of one that sleeps whether its memory is in RAM or on Disk, where this\nprogram may ask the Kubernetes API.",
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
	var memory agents.MemoryPlace
	if d.State == restclient.StatePaused {
		memory = a.memoryPlace(ctx, id)
	}
	if a.json {
		return a.printJSON(struct {
			restclient.Detail
			Memory agents.MemoryPlace `json:"memory,omitempty"`
		}{d, memory})
	}
	line := func(name, value string) { a.field(12, name, value) }
	line("ID", d.SandboxID)
	line("State", d.State)
	line("Memory in", string(memory))
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

// extraWithin bounds the wait for what can be left out.
const extraWithin = 10 * time.Second

// memoryPlace is where the memory of a sandbox is that sleeps. The REST API, which is E2B's, has no word for
// it, the object has. It is an extra: empty where the sandbox keeps none, or the Kubernetes API of the same
// server is out of reach.
func (a *app) memoryPlace(ctx context.Context, id string) agents.MemoryPlace {
	if a.first(a.apiURL, envAPIURL) != "" && a.first(a.kubeconfig, envKubeconfig) == "" {
		return "" // the kubeconfig of the data directory may be another server's
	}
	ctx, cancel := context.WithTimeout(ctx, extraWithin)
	defer cancel()
	k, err := a.kube(ctx)
	if err != nil {
		return ""
	}
	asleep := fields.OneTermEqualSelector("status.barchan.phase", string(sandbox.Paused)).String()
	list, err := k.client.Resource(sandboxesResource()).List(ctx, metav1.ListOptions{FieldSelector: asleep})
	if err != nil {
		return ""
	}
	for i := range list.Items {
		u := &list.Items[i]
		if string(sandbox.IDOf(u.GetUID())) != id {
			continue
		}
		if s, err := as[agents.Sandbox](u); err == nil && s.Status.Barchan != nil {
			return s.Status.Barchan.Memory
		}
	}
	return ""
}
