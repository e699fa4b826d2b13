// Package artifact has the commands on what is stored: snapshots and images, with their export and import.
package artifact

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// SnapshotCommand returns `barchan snapshot`.
func SnapshotCommand(a *app.App) *cobra.Command {
	var name string
	var filesOnly bool
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "snapshot SANDBOX",
		Short: "Keep a sandbox as it is now, for others to start from",
		Long: "Keep a sandbox as it is now, with its programs, memory and files, for others to start from, and print the snapshot's ID.\n" +
			"The sandbox stays as it was, running or paused.",
		Example: "  snap=$(barchan snapshot i3k --name warm)\n  barchan run --from $snap -- ps\n  barchan run --from warm -- ps",
	}
	f := cmd.Flags()
	f.StringVar(&name, "name", "", "its name, or NAME:TAG (default the template's, with a new tag)")
	f.BoolVar(&filesOnly, "files-only", false, "leave out the memory")
	f.DurationVar(&ttl, "ttl", 0, "time after which it is deleted (default never)")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := app.AtLeastSecond(cmd, "ttl", ttl); err != nil && ttl != 0 {
			return err
		}
		n := client.SnapshotOptions{Name: name, TTL: ttl}
		if filesOnly {
			n.Memory = new(false)
		}
		err := a.WithServer(cmd.Context(), func(t *app.Server) error { return snapshot(cmd.Context(), a, t, args[0], n) })
		if errors.Is(err, errs.ErrNotFound) {
			err = errs.Public(err, app.Message(err)+app.Meant(cmd, args[0], "barchan snapshot "))
		}
		return err
	}
	cmd.AddCommand(snapshotLsCommand(a), snapshotRmCommand(a), snapshotShowCommand(a), snapshotExportCommand(a), snapshotImportCommand(a))
	return cmd
}

func snapshot(ctx context.Context, a *app.App, t *app.Server, text string, n client.SnapshotOptions) error {
	id, err := t.Resolve(ctx, text)
	if err != nil {
		return err
	}
	done := a.NotifyIfSlow("writing " + id)
	s, err := t.REST.CreateSnapshot(ctx, id, n)
	done()
	if err != nil {
		return err
	}
	return a.Result(s, s.SnapshotID)
}

func snapshotLsCommand(a *app.App) *cobra.Command {
	var o client.SnapshotsOptions
	var in app.Scope
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List snapshots",
		Long: "List the snapshots of the key's namespace, the newest first. With --namespace or -A, list the objects of the\n" +
			"Kubernetes API instead, also those that the server makes for its own use: their PURPOSE is fork or warm-up. STATUS is\n" +
			"what an unready snapshot, or a deleted one in use, waits for.",
	}
	f := cmd.Flags()
	f.StringVar(&o.SandboxID, "sandbox", "", "only those of one sandbox, by its whole ID if it is gone")
	f.StringVar(&o.Name, "name", "", "only those of one name")
	f.IntVarP(&o.Limit, "limit", "n", 0, "greatest number to list, the newest first (default all)")
	f.StringVar(&in.Namespace, "namespace", "", "objects of this namespace")
	f.BoolVarP(&in.All, "all-namespaces", "A", false, "objects of all namespaces")
	a.ListFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		objects := in.All || in.Namespace != ""
		switch {
		case o.Limit < 0:
			return app.Usage(cmd, fmt.Errorf("--limit: %d is negative", o.Limit))
		case objects && o != (client.SnapshotsOptions{}):
			return app.Usage(cmd, errors.New("--sandbox, --name and --limit are of the key's namespace; leave out --namespace and -A"))
		case objects:
			return app.ListObjects(cmd.Context(), a, snapshotObjects(), in.List())
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			if o.SandboxID != "" {
				id, err := t.Resolve(cmd.Context(), o.SandboxID)
				if err != nil {
					return err
				}
				o.SandboxID = id
			}
			list, err := t.REST.Snapshots(cmd.Context(), o)
			if err != nil {
				return err
			}
			return app.PrintList(a, snapshotColumns(), list)
		})
	}
	return cmd
}

func snapshotColumns() app.Columns[client.Snapshot] {
	return app.Columns[client.Snapshot]{
		Header: []string{"ID", "NAME", "SANDBOX", "TEMPLATE", "CONTENT", "SIZE", "SECRETS", "AGE", "ENDS IN", "MEMORY", "CREATED"},
		Wide:   2,
		None:   "no snapshots; `barchan snapshot SANDBOX` makes one",
		Row: func(s *client.Snapshot) []string {
			name, _, _ := strings.Cut(s.SnapshotID, ":")
			return []string{
				s.SnapshotID, name, s.SandboxID, terminal.Dash(s.TemplateID), contentOf(s), terminal.Size(s.SizeBytes), yesNo(s.Secrets),
				terminal.Since(s.CreatedAt), endsIn(s), terminal.Size(s.MemoryBytes), s.CreatedAt.UTC().Format(time.RFC3339),
			}
		},
	}
}

func contentOf(s *client.Snapshot) string {
	if s.Memory {
		return "memory and files"
	}
	return "files"
}

func endsIn(s *client.Snapshot) string {
	if s.ExpiresAt == nil {
		return "-"
	}
	return terminal.Until(*s.ExpiresAt)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func snapshotShowCommand(a *app.App) *cobra.Command {
	var namespace string
	cmd := &cobra.Command{
		Use: "show SNAPSHOT", Short: "Show one snapshot, or the newest of a name",
		Long: "Show one snapshot, or the newest of a name. With --namespace, show its object: the state that it is in, and what is\nneeded to restore it.",
	}
	namespaceFlag(cmd, &namespace)
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if namespace != "" {
			return a.WithKube(cmd.Context(), func(k *app.Kube) error {
				return showSnapshotObject(cmd.Context(), a, k, namespace, args[0])
			})
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			list, err := t.REST.Snapshots(cmd.Context(), client.SnapshotsOptions{Name: args[0], Limit: 1})
			switch {
			case err != nil:
				return err
			case len(list) == 0:
				return app.NoSnapshot(args[0])
			case a.JSON:
				return a.PrintJSON(list[0])
			}
			showSnapshot(a, &list[0])
			return nil
		})
	}
	return cmd
}

// namespaceFlag selects the objects of a namespace, instead of the REST API's list.
func namespaceFlag(cmd *cobra.Command, namespace *string) {
	cmd.Flags().StringVarP(namespace, "namespace", "n", "", "among the objects of this namespace (default the key's namespace)")
}

func showSnapshot(a *app.App, s *client.Snapshot) {
	line := func(name, value string) { a.Field(10, name, value) }
	line("ID", s.SnapshotID)
	line("Sandbox", s.SandboxID)
	line("Template", terminal.Dash(s.TemplateID))
	line("Content", contentOf(s))
	line("Size", terminal.Size(s.SizeBytes)+", of which memory "+terminal.Size(s.MemoryBytes))
	line("Secrets", yesNo(s.Secrets))
	line("Made", s.CreatedAt.Local().Format("2006-01-02 15:04:05")+", "+terminal.Since(s.CreatedAt)+" ago")
	line("Ends in", endsIn(s))
}

func snapshotRmCommand(a *app.App) *cobra.Command {
	var namespace string
	cmd := &cobra.Command{
		Use: "rm SNAPSHOT...", Short: "Delete snapshots",
		Long: "Delete snapshots. Sandboxes that were started from one need it no more.",
	}
	namespaceFlag(cmd, &namespace)
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if namespace != "" {
			return a.RemoveObjects(cmd.Context(), app.CheckpointKind(), namespace, args)
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			return a.Each(args, func(id string) (string, error) {
				err := t.REST.DeleteSnapshot(cmd.Context(), id)
				if errors.Is(err, errs.ErrNotFound) {
					err = app.NoSnapshot(id)
				}
				return id, err
			})
		})
	}
	return cmd
}
