package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

func (a *app) keyCommand() *cobra.Command {
	return nounCommand("key", "Keys of the REST API", a.keyCreateCommand(), a.keyLsCommand(), a.keyRmCommand())
}

func (a *app) keyCreateCommand() *cobra.Command {
	var s scope
	var description string
	var expires time.Duration
	cmd := &cobra.Command{
		Use:   "create [NAME]",
		Short: "Make a key, and show it this once",
		Long:  "Make a key for a namespace, which is made too if it is new. The key is printed this once; only its hash is kept.",
		Args:  cobra.MaximumNArgs(1),
	}
	s.flags(cmd, false)
	cmd.Flags().StringVar(&description, "description", "", "note to find it again by")
	cmd.Flags().DurationVar(&expires, "expires", 0, "life of the key (default for ever)")
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if expires < 0 {
			return &usageError{cmd, fmt.Errorf("--expires: %s is in the past", expires)}
		}
		text, object := newKey()
		object.Namespace, object.Spec.Description = s.namespace, description
		if len(args) == 1 {
			object.Name = args[0]
		}
		if expires > 0 {
			// Objects store whole seconds: round up, or the key would expire early.
			object.Spec.ExpiresAt = &metav1.Time{Time: time.Now().Add(expires + time.Second - 1).Truncate(time.Second)}
		}
		k, err := a.kube(cmd.Context())
		if err != nil {
			return err
		}
		if err := k.createKey(cmd.Context(), object); err != nil {
			return err
		}
		if a.json {
			return a.printJSON(map[string]string{"namespace": object.Namespace, "name": object.Name, "key": text})
		}
		fmt.Fprintf(a.stderr, "key %s of namespace %s; it is not shown again:\n", object.Name, object.Namespace)
		fmt.Fprintln(a.stdout, text)
		return nil
	}
	return cmd
}

// newKey returns a key and the object with its hash.
func newKey() (string, *barchan.APIKey) {
	text := barchan.NewKeySecret()
	spec := barchan.NewAPIKeySpec(text, "")
	return text, &barchan.APIKey{
		TypeMeta:   metav1.TypeMeta{APIVersion: barchan.GroupVersion.String(), Kind: "APIKey"},
		ObjectMeta: metav1.ObjectMeta{Name: "key-" + spec.SHA256[:8]},
		Spec:       spec,
	}
}

func (k *kube) createKey(ctx context.Context, key *barchan.APIKey) error {
	space := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": key.Namespace},
	}}
	options := metav1.CreateOptions{FieldManager: fieldManager}
	_, err := k.client.Resource(namespacesResource()).Create(ctx, space, options)
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return kubeError(err)
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(key)
	if err != nil {
		return fmt.Errorf("encode key: %w", err)
	}
	_, err = k.client.Resource(keysResource()).Namespace(key.Namespace).
		Create(ctx, &unstructured.Unstructured{Object: content}, options)
	return kubeError(err)
}

func (a *app) keyLsCommand() *cobra.Command {
	return lsCommand(a, lister[barchan.APIKey]{
		short: "List keys",
		find:  allOf[barchan.APIKey](keysResource()),
		columns: columns[barchan.APIKey]{
			header: []string{"NAMESPACE", "ID", "NAME", "KEY", "EXPIRES IN", "AGE", "DESCRIPTION"},
			row: func(key *barchan.APIKey) []string {
				expires := "-"
				if key.Spec.ExpiresAt != nil {
					expires = left(key.Spec.ExpiresAt.Time)
				}
				return []string{
					key.Namespace, string(key.UID), key.Name, key.Spec.Prefix + "…", expires, since(key.CreationTimestamp.Time), key.Spec.Description,
				}
			},
		},
	})
}

func (a *app) keyRmCommand() *cobra.Command {
	return a.rmCommand("Remove keys; they are refused from then on", keyKind())
}
