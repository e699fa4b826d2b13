package resources

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// KeyCommand returns `barchan key`.
func KeyCommand(a *app.App) *cobra.Command {
	return app.NounCommand("key", "Keys of the REST API", keyCreateCommand(a), keyLsCommand(a),
		a.RemoveCommand("Remove keys; they are refused from then on", app.KeyKind()))
}

func keyCreateCommand(a *app.App) *cobra.Command {
	var s app.Scope
	var description, scope string
	var expires time.Duration
	cmd := &cobra.Command{
		Use:   "create [NAME]",
		Short: "Make a key, and show it once",
		Long:  "Make a key for a namespace, which is made too if it is new. The key is printed once; the server keeps only its hash.",
	}
	s.Flags(cmd, false)
	cmd.Flags().StringVar(&description, "description", "", "note to find it again by")
	cmd.Flags().StringVar(&scope, "scope", string(barchan.ScopeAdmin), "what it may do: use, manage or admin (docs/tenancy.md)")
	cmd.Flags().DurationVar(&expires, "expires", 0, "life of the key (default unlimited)")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if expires < 0 {
			return app.Usage(cmd, fmt.Errorf("--expires: %s is in the past", expires))
		}
		if !barchan.KeyScope(scope).Known() {
			return app.Usage(cmd, fmt.Errorf("--scope: %q is none of %v", scope, barchan.KeyScopes()))
		}
		text, object := app.NewKey()
		object.Namespace, object.Spec.Description, object.Spec.Scope = s.Namespace, description, barchan.KeyScope(scope)
		if len(args) == 1 {
			object.Name = args[0]
			if reason := kubeobjects.InvalidName(object.Name); reason != "" { // the server would refuse it after the namespace is made
				return app.Usage(cmd, fmt.Errorf("NAME: %q: %s", object.Name, reason))
			}
		}
		if expires > 0 {
			// Objects store whole seconds: round up, or the key would expire early.
			object.Spec.ExpiresAt = &metav1.Time{Time: time.Now().Add(expires + time.Second - 1).Truncate(time.Second)}
		}
		k, err := a.Kube(cmd.Context())
		if err != nil {
			return err
		}
		if err := app.CreateKey(cmd.Context(), k, object); err != nil {
			return err
		}
		if a.JSON {
			return a.PrintJSON(map[string]string{"namespace": object.Namespace, "name": object.Name, "key": text})
		}
		fmt.Fprintf(a.Stderr, "key %s of namespace %s; it is not shown again:\n", object.Name, object.Namespace)
		fmt.Fprintln(a.Stdout, text)
		return nil
	}
	return cmd
}

func keyLsCommand(a *app.App) *cobra.Command {
	return app.ListCommand(a, app.Lister[barchan.APIKey]{
		Short: "List keys",
		Find:  app.AllOf[barchan.APIKey](app.KeysResource),
		Columns: app.Columns[barchan.APIKey]{
			Header: []string{"NAMESPACE", "ID", "NAME", "KEY", "SCOPE", "EXPIRES IN", "LAST USED", "AGE", "DESCRIPTION"},
			Row: func(key *barchan.APIKey) []string {
				expires, used := "-", "-"
				if key.Spec.ExpiresAt != nil {
					expires = terminal.Until(key.Spec.ExpiresAt.Time)
				}
				if key.Status.LastUsedAt != nil {
					used = terminal.Since(key.Status.LastUsedAt.Time)
				}
				return []string{
					key.Namespace, string(key.UID), key.Name, key.Spec.Prefix + "…", string(key.Spec.Scope.OrAdmin()), expires, used, terminal.Since(key.CreationTimestamp.Time), key.Spec.Description,
				}
			},
		},
	})
}
