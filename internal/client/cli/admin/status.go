package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// StatusCommand returns `barchan status`.
func StatusCommand(a *app.App) *cobra.Command {
	local := show(a, (*adminclient.Client).Status, printStatus)
	return a.JSONFlag(&cobra.Command{
		Use:   "status",
		Short: "Show the state of the server",
		Long:  "Show the state of this machine's server; with --api-url, whether another is ready. The exit code is 1 if it is not.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if a.APIURL != "" {
				return remoteStatus(cmd.Context(), a)
			}
			return local(cmd, args)
		},
	})
}

const (
	// maxReadiness bounds the response of a server's readiness, in bytes.
	maxReadiness     = 64 << 10
	readinessTimeout = 10 * time.Second
)

// remoteStatus prints what a server responds about its readiness, which needs no key.
func remoteStatus(ctx context.Context, a *app.App) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(a.APIURL, "/")+"/readyz", http.NoBody)
	if err != nil {
		return fmt.Errorf("--api-url: %w: %w", err, errs.ErrInvalid)
	}
	resp, err := (&http.Client{Transport: client.NewTransport(), Timeout: readinessTimeout}).Do(req)
	if err != nil {
		if failed, ok := errors.AsType[*url.Error](err); ok {
			err = failed.Err
		}
		return fmt.Errorf("reach %s: %w: %w", a.APIURL, err, errs.ErrUnavailable)
	}
	defer func() { _ = resp.Body.Close() }()
	var state struct {
		Ready bool `json:"ready"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxReadiness)).Decode(&state); err != nil {
		return fmt.Errorf("%s is not a server of Barchan: %s: %w: %w", a.APIURL, resp.Status, err, errs.ErrInvalid)
	}
	if !state.Ready {
		return fmt.Errorf("%s is not ready: %w", a.APIURL, errs.ErrUnavailable)
	}
	if a.JSON {
		return a.PrintJSON(state)
	}
	fmt.Fprintf(a.Stdout, "%-*s ready\n", statusWidth, "State")
	return nil
}

// show returns the work of a command that prints one thing of the local server: with write, or as JSON.
func show[T any](a *app.App, get func(*adminclient.Client, context.Context) (T, error), write func(*app.App, T)) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		return a.WithAdmin(func(c *adminclient.Client) error {
			v, err := get(c, cmd.Context())
			switch {
			case err != nil:
				return err
			case a.JSON:
				return a.PrintJSON(v)
			}
			write(a, v)
			return nil
		})
	}
}

// statusWidth is that of the longest name, barchan-agent.
const statusWidth = 13

func printStatus(a *app.App, s adminclient.Status) {
	state := s.Phase
	if s.Ready {
		state = "ready"
	}
	line := func(name, value string) { a.Field(statusWidth, name, value) }
	if a.Coloured(a.Stdout) {
		state = terminal.Paint(map[bool]string{true: terminal.Green, false: terminal.Yellow}[s.Ready], state)
	}
	fmt.Fprintf(a.Stdout, "%-*s %s\n", statusWidth, "State", state)
	for _, c := range s.Conditions {
		line("Degraded", c.Name+": "+cmp.Or(c.Reason, c.Detail)+" (for "+terminal.Since(c.Since)+"; no new work is taken meanwhile)")
	}
	line("Version", s.Version)
	line("Process", strconv.Itoa(s.PID)+", up "+terminal.Since(s.StartedAt))
	line("Role", s.Role)
	line("Node", s.Node)
	line("Data", s.DataDir)
	line("HTTP", "http://"+s.Addresses.HTTP)
	if s.Addresses.SSH != "" {
		line("SSH", s.Addresses.SSH)
	}
	if s.Addresses.TLS != "" {
		authority := ""
		if s.Addresses.CAFile != "" {
			authority = ", CA " + s.Addresses.CAFile
		}
		line("TLS", "https://"+s.Addresses.TLS+", domain "+s.Addresses.Domain+authority)
	}
	if kube := s.Addresses.Kube; strings.Contains(kube, "://") {
		line("Kubernetes", kube+", kubeconfig "+s.Addresses.Kubeconfig)
	} else {
		line("Kubernetes", "https://"+kube+", kubeconfig "+s.Addresses.Kubeconfig)
	}
	for _, c := range s.Certificates {
		line("Certificate", certificateLine(c))
	}
	for _, p := range s.Peers {
		line("Peer", p.Name+" at "+p.Gossip)
	}
	line("Sandboxes", counts(s.Sandboxes))
	for _, c := range s.Components {
		pid := ""
		if c.PID != 0 {
			pid = "process " + strconv.Itoa(c.PID)
		}
		line(c.Name, strings.Join(strings.Fields(strings.Join([]string{c.Version, c.State, c.Path, pid}, " ")), " "))
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

func certificateLine(c adminclient.Certificate) string {
	text := strings.Join(c.Names, ", ") + ": "
	if c.Expires.IsZero() {
		text += "not issued yet"
	} else {
		text += "until " + c.Expires.Format(time.DateOnly) + ", by " + c.Issuer
	}
	if c.Failures > 0 {
		text += fmt.Sprintf("; %d failed tries, the last: %s; next at %s", c.Failures, c.Failure, c.Next.Format(time.RFC3339))
	}
	return text
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
