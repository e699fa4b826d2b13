package resources

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// ApplyCommand returns `barchan apply`.
func ApplyCommand(a *app.App) *cobra.Command {
	var files []string
	var namespace string
	var opt kubeobjects.Options
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Create or change objects from a file",
		Long: "Create or change objects from YAML or JSON, by server-side apply. FILE may have several documents; - is standard input.\n" +
			"A file that cannot be read to its end changes nothing.",
		Example: "  barchan apply -f template.yaml",
	}
	f := cmd.Flags()
	f.StringArrayVarP(&files, "file", "f", nil, "file of objects, or -")
	f.StringVarP(&namespace, "namespace", "n", metav1.NamespaceDefault, "namespace of objects that name none")
	f.BoolVar(&opt.Force, "force-conflicts", false, "take over fields that others manage")
	f.BoolVar(&opt.DryRun, "dry-run", false, "have the server check it, and change nothing")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if len(files) == 0 {
			return app.Usage(cmd, errors.New("-f is missing"))
		}
		var objects []*unstructured.Unstructured
		for _, file := range files {
			more, err := readObjects(cmd.Context(), a, file)
			if err != nil {
				return err
			}
			objects = append(objects, more...)
		}
		k, err := a.Kube(cmd.Context())
		if err != nil {
			return err
		}
		client, err := kubeobjects.New(k.Config, k.Client, namespace)
		if err != nil {
			return err
		}
		return applyAll(cmd.Context(), a, client, objects, opt)
	}
	return cmd
}

func readObjects(ctx context.Context, a *app.App, file string) ([]*unstructured.Unstructured, error) {
	in, err := a.Open(ctx, file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }()
	objects, err := kubeobjects.Decode(in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(objects) == 0 {
		return nil, fmt.Errorf("%s: has no objects: %w", file, errs.ErrInvalid)
	}
	return objects, nil
}

func applyAll(ctx context.Context, a *app.App, client *kubeobjects.Client, objects []*unstructured.Unstructured, opt kubeobjects.Options) error {
	var failed []error
	all := []applied{}
	for _, u := range objects {
		did, err := client.Apply(ctx, u, opt)
		name := strings.ToLower(u.GetKind()) + "/" + u.GetName()
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", name, err))
			all = append(all, applied{Name: name, Error: app.Message(err)})
			continue
		}
		all = append(all, applied{Name: name, Result: did, DryRun: opt.DryRun})
		if opt.DryRun {
			did += " (dry run)"
		}
		if !a.JSON {
			fmt.Fprintln(a.Stdout, name+" "+did)
		}
	}
	if a.JSON {
		failed = append(failed, a.PrintJSON(all))
	}
	return errors.Join(failed...)
}

// applied is what became of an object, in JSON.
type applied struct {
	Name   string `json:"name"`             // kind and name
	Result string `json:"result,omitempty"` // created, configured or unchanged
	Error  string `json:"error,omitempty"`
	DryRun bool   `json:"dryRun,omitempty"`
}
