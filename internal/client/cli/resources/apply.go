package resources

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// applier applies objects of any kind that the server has.
type applier struct {
	kube      *app.Kube
	mapper    meta.RESTMapper
	namespace string
	options   metav1.PatchOptions
}

// ApplyCommand returns `barchan apply`.
func ApplyCommand(a *app.App) *cobra.Command {
	var files []string
	var namespace string
	var force, dry bool
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
	f.BoolVar(&force, "force-conflicts", false, "take over fields that others manage")
	f.BoolVar(&dry, "dry-run", false, "have the server check it, and change nothing")
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
		ap := &applier{kube: k, namespace: namespace, options: metav1.PatchOptions{
			FieldManager: app.FieldManager, FieldValidation: metav1.FieldValidationStrict, Force: &force,
		}}
		if dry {
			ap.options.DryRun = []string{metav1.DryRunAll}
		}
		return applyAll(cmd.Context(), a, ap, objects)
	}
	return cmd
}

func readObjects(ctx context.Context, a *app.App, file string) ([]*unstructured.Unstructured, error) {
	in, err := a.Open(ctx, file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }()
	objects, err := decodeObjects(in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(objects) == 0 {
		return nil, fmt.Errorf("%s: has no objects: %w", file, errs.ErrInvalid)
	}
	return objects, nil
}

func decodeObjects(in io.Reader) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	dec := yaml.NewYAMLOrJSONDecoder(in, 4096)
	for n := 1; ; n++ {
		var raw map[string]any
		err := dec.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w: %w", n, err, errs.ErrInvalid)
		}
		if len(raw) == 0 {
			continue
		}
		u := &unstructured.Unstructured{Object: raw}
		if u.IsList() {
			err = u.EachListItem(func(o runtime.Object) error {
				item, ok := o.(*unstructured.Unstructured)
				if !ok {
					return fmt.Errorf("has an item that is no object: %w", errs.ErrInvalid)
				}
				out = append(out, item)
				return checkObject(item)
			})
		} else {
			out = append(out, u)
			err = checkObject(u)
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
	}
}

func checkObject(u *unstructured.Unstructured) error {
	switch {
	case u.GetAPIVersion() == "":
		return fmt.Errorf("apiVersion is missing: %w", errs.ErrInvalid)
	case u.GetKind() == "":
		return fmt.Errorf("kind is missing: %w", errs.ErrInvalid)
	case u.GetName() == "":
		return fmt.Errorf("metadata.name of the %s is missing: %w", u.GetKind(), errs.ErrInvalid)
	}
	return nil
}

func applyAll(ctx context.Context, a *app.App, ap *applier, objects []*unstructured.Unstructured) error {
	d, err := discovery.NewDiscoveryClientForConfig(ap.kube.Config)
	if err != nil {
		return fmt.Errorf("kubernetes API: %w", err)
	}
	groups, err := restmapper.GetAPIGroupResources(d)
	if err != nil {
		return app.KubeError(err)
	}
	ap.mapper = restmapper.NewDiscoveryRESTMapper(groups)
	var failed []error
	for _, u := range objects {
		did, err := ap.apply(ctx, u)
		name := strings.ToLower(u.GetKind()) + "/" + u.GetName()
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", name, err))
			continue
		}
		fmt.Fprintln(a.Stdout, name+" "+did)
	}
	return errors.Join(failed...)
}

func (ap *applier) apply(ctx context.Context, u *unstructured.Unstructured) (string, error) {
	gvk := u.GroupVersionKind()
	mapping, err := ap.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return "", fmt.Errorf("the server has no %s of %s: %w", gvk.Kind, gvk.GroupVersion(), errs.ErrInvalid)
	}
	var client dynamic.ResourceInterface = ap.kube.Client.Resource(mapping.Resource)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		if u.GetNamespace() == "" {
			u.SetNamespace(ap.namespace)
		}
		client = ap.kube.Client.Resource(mapping.Resource).Namespace(u.GetNamespace())
	}
	body, err := u.MarshalJSON()
	if err != nil {
		return "", fmt.Errorf("encode: %w", err)
	}
	did := "configured"
	before, err := client.Get(ctx, u.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		did = "created"
	} else if err != nil {
		return "", app.KubeError(err)
	}
	after, err := client.Patch(ctx, u.GetName(), types.ApplyPatchType, body, ap.options)
	if err != nil {
		return "", app.KubeError(err)
	}
	if did == "configured" && before.GetResourceVersion() == after.GetResourceVersion() {
		did = "unchanged"
	}
	if len(ap.options.DryRun) > 0 {
		did += " (dry run)"
	}
	return did, nil
}
