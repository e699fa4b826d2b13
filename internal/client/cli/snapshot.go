package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/restclient"
)

func (a *app) snapshotCommand() *cobra.Command {
	var name string
	var filesOnly bool
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "snapshot SANDBOX",
		Short: "Keep a sandbox as it is now, for others to start from",
		Long: "Keep a sandbox as it is now, with its programs, memory and files, for others to start from, and print the snapshot's ID.\n" +
			"The sandbox goes on as it was, running or paused.",
		Example: "  snap=$(barchan snapshot i3k --name warm)\n  barchan run --from $snap -- ps\n  barchan run --from warm -- ps",
		Args:    exactly("SANDBOX"),
	}
	f := cmd.Flags()
	f.StringVar(&name, "name", "", "its name, or NAME:TAG (default the template's, with a new tag)")
	f.BoolVar(&filesOnly, "files-only", false, "leave out the memory")
	f.DurationVar(&ttl, "ttl", 0, "time after which it is deleted (default never)")
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if ttl != 0 && ttl < time.Second {
			return &usageError{cmd, fmt.Errorf("--ttl: %s is too short, want at least 1s", ttl)}
		}
		n := restclient.NewSnapshot{Name: name, TTL: int64(ttl / time.Second)}
		if filesOnly {
			n.Memory = new(false)
		}
		err := a.withTarget(cmd.Context(), func(t *target) error { return a.snapshot(cmd.Context(), t, args[0], n) })
		if errors.Is(err, errs.ErrNotFound) {
			err = fmt.Errorf("%w%s", err, meant(cmd, args[0], "barchan snapshot "))
		}
		return err
	}
	cmd.AddCommand(a.snapshotLsCommand(), a.snapshotRmCommand(), a.snapshotShowCommand(), a.snapshotExportCommand(), a.snapshotImportCommand())
	return cmd
}

func (a *app) snapshot(ctx context.Context, t *target, text string, n restclient.NewSnapshot) error {
	id, err := t.resolve(ctx, text)
	if err != nil {
		return err
	}
	done := a.saying("writing " + id)
	s, err := t.rest.CreateSnapshot(ctx, id, n)
	done()
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(s)
	}
	fmt.Fprintln(a.stdout, s.SnapshotID)
	return nil
}

// patienceOfPeople is the delay before a progress message.
const patienceOfPeople = time.Second

// saying shows a progress message if a call takes long. Call done at the end.
func (a *app) saying(what string) (done func()) {
	start := time.Now()
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(patienceOfPeople)
		defer tick.Stop()
		for wait := 1; ; wait++ {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			if wait == 1 || wait%10 == 0 {
				fmt.Fprintf(a.stderr, "%s, for %s\n", what, age(time.Since(start)))
			}
		}
	}()
	return func() { close(stop); <-ended }
}

func (a *app) snapshotLsCommand() *cobra.Command {
	var o restclient.SnapshotListOptions
	var in scope
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List snapshots", Args: exactly(),
		Long: "List the snapshots of the key's namespace, the newest first. With --namespace or -A, list the objects of the\n" +
			"Kubernetes API instead, also those that the server makes for its own use: their PURPOSE is fork or warm-up. STATUS says\n" +
			"what one waits for that is not ready, or is deleted and still needed.",
	}
	f := cmd.Flags()
	f.StringVar(&o.SandboxID, "sandbox", "", "only those of one sandbox, by its whole ID if it is gone")
	f.StringVar(&o.Name, "name", "", "only those of one name")
	f.IntVarP(&o.Limit, "limit", "n", 0, "at most so many, the newest first (default all)")
	f.StringVar(&in.namespace, "namespace", "", "objects of this namespace")
	f.BoolVarP(&in.all, "all-namespaces", "A", false, "objects of all namespaces")
	a.listFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		objects := in.all || in.namespace != ""
		switch {
		case o.Limit < 0:
			return &usageError{cmd, fmt.Errorf("--limit: %d is negative", o.Limit)}
		case objects && o != (restclient.SnapshotListOptions{}):
			return &usageError{cmd, errors.New("--sandbox, --name and --limit are of the key's namespace; leave out --namespace and -A")}
		case objects:
			return listObjects(cmd.Context(), a, snapshotObjects(), in.list())
		}
		return a.withTarget(cmd.Context(), func(t *target) error {
			if o.SandboxID != "" {
				id, err := t.resolve(cmd.Context(), o.SandboxID)
				if err != nil {
					return err
				}
				o.SandboxID = id
			}
			list, err := t.rest.Snapshots(cmd.Context(), o)
			if err != nil {
				return err
			}
			return printList(a, snapshotColumns(), list)
		})
	}
	return cmd
}

func snapshotColumns() columns[restclient.Snapshot] {
	return columns[restclient.Snapshot]{
		header: []string{"ID", "NAME", "SANDBOX", "TEMPLATE", "CONTENT", "SIZE", "SECRETS", "AGE", "ENDS IN", "MEMORY", "CREATED"},
		wide:   2,
		none:   "no snapshots; `barchan snapshot SANDBOX` makes one",
		row: func(s *restclient.Snapshot) []string {
			name, _, _ := strings.Cut(s.SnapshotID, ":")
			return []string{
				s.SnapshotID, name, s.SandboxID, dash(s.TemplateID), contentOf(s), size(s.SizeBytes), yesNo(s.Secrets),
				since(s.CreatedAt), endsIn(s), size(s.MemoryBytes), s.CreatedAt.UTC().Format(time.RFC3339),
			}
		},
	}
}

func contentOf(s *restclient.Snapshot) string {
	if s.Memory {
		return "memory and files"
	}
	return "files"
}

func endsIn(s *restclient.Snapshot) string {
	if s.ExpiresAt == nil {
		return "-"
	}
	return left(*s.ExpiresAt)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func (a *app) snapshotShowCommand() *cobra.Command {
	var namespace string
	cmd := &cobra.Command{
		Use: "show SNAPSHOT", Short: "Show one snapshot, or the newest of a name", Args: exactly("SNAPSHOT"),
		Long: "Show one snapshot, or the newest of a name. With --namespace, show its object: the state that it is in, and what is\nneeded to restore it.",
	}
	namespaceFlag(cmd, &namespace)
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if namespace != "" {
			return a.showSnapshotObject(cmd.Context(), namespace, args[0])
		}
		return a.withTarget(cmd.Context(), func(t *target) error {
			list, err := t.rest.Snapshots(cmd.Context(), restclient.SnapshotListOptions{Name: args[0], Limit: 1})
			switch {
			case err != nil:
				return err
			case len(list) == 0:
				return fmt.Errorf("snapshot %q not found; `barchan snapshot ls` lists them: %w", args[0], errs.ErrNotFound)
			case a.json:
				return a.printJSON(list[0])
			}
			a.showSnapshot(&list[0])
			return nil
		})
	}
	return cmd
}

// namespaceFlag selects the objects of a namespace, instead of the REST API's list.
func namespaceFlag(cmd *cobra.Command, namespace *string) {
	cmd.Flags().StringVarP(namespace, "namespace", "n", "", "among the objects of this namespace (default the key's namespace)")
}

func (a *app) showSnapshot(s *restclient.Snapshot) {
	line := func(name, value string) { a.field(10, name, value) }
	line("ID", s.SnapshotID)
	line("Sandbox", s.SandboxID)
	line("Template", dash(s.TemplateID))
	line("Content", contentOf(s))
	line("Size", size(s.SizeBytes)+", of which memory "+size(s.MemoryBytes))
	line("Secrets", yesNo(s.Secrets))
	line("Made", s.CreatedAt.Local().Format("2006-01-02 15:04:05")+", "+since(s.CreatedAt)+" ago")
	line("Ends in", endsIn(s))
}

func (a *app) snapshotRmCommand() *cobra.Command {
	var namespace string
	cmd := &cobra.Command{
		Use: "rm SNAPSHOT...", Short: "Delete snapshots",
		Long: "Delete snapshots. Sandboxes that were started from one need it no more.",
		Args: atLeast("SNAPSHOT"),
	}
	namespaceFlag(cmd, &namespace)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if namespace != "" {
			k, err := a.kube(cmd.Context())
			if err != nil {
				return err
			}
			return k.remove(cmd.Context(), a.stdout, checkpointKind(), namespace, args)
		}
		return a.withTarget(cmd.Context(), func(t *target) error {
			var failed []error
			for _, id := range args {
				if err := t.rest.DeleteSnapshot(cmd.Context(), id); err != nil {
					failed = append(failed, err)
					continue
				}
				fmt.Fprintln(a.stdout, id)
			}
			return errors.Join(failed...)
		})
	}
	return cmd
}
