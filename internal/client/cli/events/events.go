// Package events has the commands that show sandboxes' events and manage webhooks. They call the REST API and decide nothing.
package events

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

const (
	prefix = "sandbox.lifecycle."
	// page is the most events that the API returns at once.
	page = 100
	// watchEvery is how often --watch asks, and mostAtOnce how many events it prints of that time.
	watchEvery = time.Second
	mostAtOnce = 10_000
)

// full returns the types of the API for short names such as created.
func full(types []string) []string {
	out := make([]string, len(types))
	for i, t := range types {
		if !strings.Contains(t, ".") {
			t = prefix + t
		}
		out[i] = t
	}
	return out
}

// short returns short names.
func short(types []string) string {
	names := make([]string, len(types))
	for i, t := range types {
		names[i] = strings.TrimPrefix(t, prefix)
	}
	return strings.Join(names, ",")
}

// Command returns `barchan events`.
func Command(a *app.App) *cobra.Command {
	var r client.EventsRequest
	var watch bool
	cmd := &cobra.Command{
		Use: "events [SANDBOX]", Short: "Show what became of sandboxes",
		Long: "Show the lifecycle events of a sandbox, which may be gone, or of all in the key's namespace:\n" +
			"created, updated, paused, resumed, checkpointed and killed. The newest are at the end. With --watch later ones\n" +
			"are printed as they happen; with --json each is then a line.",
		Example: "  barchan events --type killed --limit 20\n  barchan events --watch --limit 1 --json | jq .type",
	}
	f := cmd.Flags()
	f.StringSliceVar(&r.Types, "type", nil, "types to show, such as created,killed (default all)")
	f.IntVar(&r.Limit, "limit", page, "number of the newest events to show")
	f.BoolVarP(&watch, "watch", "w", false, "go on with later events until interrupted")
	a.ListFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if r.Limit < 1 {
			return app.Usage(cmd, errors.New("--limit: want 1 or more"))
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			if len(args) == 1 {
				r.SandboxID = args[0]
			}
			r.Types = full(r.Types)
			if watch {
				return follow(cmd.Context(), a, t.REST, r)
			}
			list, err := newest(cmd.Context(), t.REST, r, client.SandboxEvent{})
			if err != nil {
				return err
			}
			return app.PrintList(a, columns(), list)
		})
	}
	return cmd
}

func columns() app.Columns[client.SandboxEvent] {
	return app.Columns[client.SandboxEvent]{
		Header: []string{"TIME", "EVENT", "SANDBOX", "TEMPLATE", "EXECUTION", "ID"}, Wide: 2, None: "no events",
		Row: func(e *client.SandboxEvent) []string {
			return []string{e.Timestamp.Local().Format(time.DateTime), strings.TrimPrefix(e.Type, prefix), e.SandboxID, e.TemplateID, e.ExecutionID, e.ID}
		},
	}
}

// newest returns the newest events that are later than last, oldest first, by pages.
func newest(ctx context.Context, c *client.Client, r client.EventsRequest, last client.SandboxEvent) ([]client.SandboxEvent, error) {
	var all []client.SandboxEvent
	for most, end := r.Limit, false; len(all) < most && !end; {
		r.Limit = min(most-len(all), page)
		list, err := c.Events(ctx, r)
		if err != nil {
			return nil, err
		}
		known := slices.IndexFunc(list, func(e client.SandboxEvent) bool { return e.ID == last.ID || e.Timestamp.Before(last.Timestamp) })
		end = known >= 0 || len(list) < r.Limit
		r.Offset += len(list)
		if known >= 0 {
			list = list[:known]
		}
		all = append(all, list...)
	}
	slices.Reverse(all)
	return all, nil
}

// follow prints the newest events and later ones until ctx ends.
func follow(ctx context.Context, a *app.App, c *client.Client, r client.EventsRequest) error {
	show := app.StreamList(a, columns(), 19, 12, 20, 20, 36, 0)
	var last client.SandboxEvent
	for {
		list, err := newest(ctx, c, r, last)
		if err != nil {
			return err
		}
		for i := range list {
			if err := show(&list[i]); err != nil {
				return err
			}
			last = list[i]
		}
		r.Limit = mostAtOnce
		if !lifecycle.Sleep(ctx, watchEvery) {
			return context.Cause(ctx)
		}
	}
}

// WebhookCommand returns `barchan webhook`.
func WebhookCommand(a *app.App) *cobra.Command {
	return app.NounCommand("webhook", "Have events sent to a URL", createCommand(a), lsCommand(a), showCommand(a), setCommand(a), rmCommand(a))
}

// secretFrom reads a secret, which no argument may have: other users see those.
func secretFrom(a *app.App, cmd *cobra.Command, file string) (string, error) {
	in, err := a.Open(cmd.Context(), file)
	if err != nil {
		return "", err
	}
	defer func() { _ = in.Close() }()
	text, err := io.ReadAll(io.LimitReader(in, 1<<10))
	if err != nil {
		return "", fmt.Errorf("read %s: %w", file, err)
	}
	return strings.TrimRight(string(text), "\r\n"), nil
}

func createCommand(a *app.App) *cobra.Command {
	var types []string
	var secret string
	cmd := &cobra.Command{
		Use: "create NAME URL", Short: "Make a webhook, and print its ID",
		Long: "Make a webhook, and print its ID. The server sends it the events of the key's namespace from then on,\n" +
			"signed with the secret. The URL must have a public address, or one that the operator allows with webhookAllow.",
		Example: "  openssl rand -hex 32 > secret\n  barchan webhook create audit https://example.com/hook --secret-file secret --type created,killed",
	}
	f := cmd.Flags()
	f.StringSliceVar(&types, "type", []string{"created", "updated", "paused", "resumed", "checkpointed", "killed"}, "types to send")
	f.StringVar(&secret, "secret-file", "", "file with the secret for signatures, or -")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if secret == "" {
			return app.Usage(cmd, errors.New("--secret-file is missing"))
		}
		text, err := secretFrom(a, cmd, secret)
		if err != nil {
			return err
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			w, err := t.REST.CreateWebhook(cmd.Context(), client.WebhookChange{Name: args[0], URL: args[1], Events: full(types), SignatureSecret: text})
			if err != nil {
				return err
			}
			return a.Result(w, w.ID)
		})
	}
	return cmd
}

func lsCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{Use: "ls", Aliases: []string{"list"}, Short: "List webhooks"}
	a.ListFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			list, err := t.REST.Webhooks(cmd.Context())
			if err != nil {
				return err
			}
			return app.PrintList(a, app.Columns[client.Webhook]{
				Header: []string{"ID", "NAME", "STATE", "URL", "EVENTS"}, Wide: 1, None: "no webhooks; `barchan webhook create` makes one",
				Row: func(w *client.Webhook) []string { return []string{w.ID, w.Name, state(w), w.URL, short(w.Events)} },
			}, list)
		})
	}
	return cmd
}

func state(w *client.Webhook) string {
	switch {
	case !w.Enabled:
		return "disabled"
	case w.FailingSince != nil:
		return "failing"
	}
	return "enabled"
}

func showCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{Use: "show WEBHOOK", Short: "Show one webhook, by its name or ID, and why deliveries fail"}
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			w, err := t.REST.Webhook(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.JSON {
				return a.PrintJSON(w)
			}
			line := func(name, value string) {
				if value != "" {
					a.Field(10, name, value)
				}
			}
			line("ID", w.ID)
			line("Name", w.Name)
			line("URL", w.URL)
			line("Events", short(w.Events))
			line("State", state(&w))
			line("Reason", w.DisabledReason)
			line("Last error", w.LastError)
			if w.FailingSince != nil {
				line("Failing", "for "+terminal.Since(*w.FailingSince))
			}
			return nil
		})
	}
	return cmd
}

func setCommand(a *app.App) *cobra.Command {
	var c client.WebhookChange
	var types []string
	var secret string
	var enable, disable bool
	cmd := &cobra.Command{
		Use: "set WEBHOOK", Short: "Change a webhook",
		Long: "Change a webhook. One that the server has disabled is tried again with --enable, from the event at which it failed.",
	}
	f := cmd.Flags()
	f.StringVar(&c.Name, "name", "", "new name")
	f.StringVar(&c.URL, "url", "", "new URL")
	f.StringSliceVar(&types, "type", nil, "types to send")
	f.StringVar(&secret, "secret-file", "", "file with the new secret for signatures, or -")
	f.BoolVar(&enable, "enable", false, "send events")
	f.BoolVar(&disable, "disable", false, "send none")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case enable && disable:
			return app.Usage(cmd, errors.New("want either --enable or --disable"))
		case c.Name+c.URL+secret == "" && len(types) == 0 && !enable && !disable:
			return app.Usage(cmd, errors.New("no change is named"))
		case enable || disable:
			c.Enabled = &enable
		}
		c.Events = full(types)
		if secret != "" {
			text, err := secretFrom(a, cmd, secret)
			if err != nil {
				return err
			}
			c.SignatureSecret = text
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			w, err := t.REST.Webhook(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if w, err = t.REST.UpdateWebhook(cmd.Context(), w.ID, c); err != nil {
				return err
			}
			return a.Result(w, w.ID)
		})
	}
	return cmd
}

func rmCommand(a *app.App) *cobra.Command {
	cmd := a.JSONFlag(&cobra.Command{Use: "rm WEBHOOK...", Short: "Delete webhooks"})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			return a.Each(args, func(name string) (string, error) {
				w, err := t.REST.Webhook(cmd.Context(), name)
				if err != nil {
					return name, err
				}
				return w.ID, t.REST.DeleteWebhook(cmd.Context(), w.ID)
			})
		})
	}
	return cmd
}
