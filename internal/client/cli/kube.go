package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// fieldManager names this program's writes to the Kubernetes API.
const fieldManager = "barchan"

func templatesResource() schema.GroupVersionResource {
	return extensions.GroupVersion.WithResource("sandboxtemplates")
}

func poolsResource() schema.GroupVersionResource {
	return extensions.GroupVersion.WithResource("sandboxwarmpools")
}

func sandboxesResource() schema.GroupVersionResource {
	return agents.GroupVersion.WithResource("sandboxes")
}

func revisionsResource() schema.GroupVersionResource {
	return barchan.GroupVersion.WithResource("templaterevisions")
}

func eventsResource() schema.GroupVersionResource {
	return schema.GroupVersionResource{Version: "v1", Resource: "events"}
}

func checkpointsResource() schema.GroupVersionResource {
	return barchan.GroupVersion.WithResource("checkpoints")
}

func keysResource() schema.GroupVersionResource {
	return barchan.GroupVersion.WithResource("apikeys")
}

func namespacesResource() schema.GroupVersionResource {
	return schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}
}

// kube is a client of the Kubernetes API.
type kube struct {
	config *rest.Config
	client dynamic.Interface
}

func (a *app) kube(ctx context.Context) (*kube, error) {
	file := a.first(a.kubeconfig, envKubeconfig)
	if file == "" {
		s, err := a.localServer(ctx)
		if err != nil {
			return nil, err
		}
		file = s.Addresses.Kubeconfig
	}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: file}, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w: %w", file, err, errs.ErrInvalid)
	}
	cfg.UserAgent = "barchan/" + a.version().Version
	cfg.QPS, cfg.Burst = -1, 0 // the server has its own limits
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", file, err)
	}
	return &kube{config: cfg, client: client}, nil
}

// scope is the namespace of a command.
type scope struct {
	namespace string
	all       bool
}

func (s *scope) flags(cmd *cobra.Command, all bool) {
	cmd.Flags().StringVarP(&s.namespace, "namespace", "n", metav1.NamespaceDefault, "namespace, E2B's team; with a key given, the key's own")
	if all {
		cmd.Flags().BoolVarP(&s.all, "all-namespaces", "A", false, "of all namespaces")
	}
}

// chooseNamespace sets a command's namespace, if none is given, to that of the given key. Without a
// key it is the default one, as for the key of the data directory.
func (a *app) chooseNamespace(ctx context.Context, cmd *cobra.Command) error {
	flag := cmd.Flags().Lookup("namespace")
	if flag == nil || flag.DefValue == "" || flag.Changed || a.givenKey() == "" {
		return nil
	}
	return a.withTarget(ctx, func(t *target) error {
		namespace, err := t.rest.Namespace(ctx)
		if err != nil {
			return fmt.Errorf("find the namespace of the key; --namespace names another: %w", err)
		}
		return flag.Value.Set(namespace)
	})
}

func (s *scope) list() string {
	if s.all {
		return metav1.NamespaceAll
	}
	return s.namespace
}

// listAs reads all objects of a resource as T.
func listAs[T any](ctx context.Context, k *kube, r schema.GroupVersionResource, namespace string) ([]T, error) {
	list, err := k.client.Resource(r).Namespace(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, kubeError(err)
	}
	out := make([]T, len(list.Items))
	for i := range list.Items {
		if out[i], err = as[T](&list.Items[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// getAs reads one object as T.
func getAs[T any](ctx context.Context, k *kube, r schema.GroupVersionResource, namespace, name string) (T, error) {
	u, err := k.client.Resource(r).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		var none T
		return none, kubeError(err)
	}
	return as[T](u)
}

// showObject prints one object as YAML or JSON.
func (a *app) showObject(ctx context.Context, r schema.GroupVersionResource, namespace, name string) error {
	k, err := a.kube(ctx)
	if err != nil {
		return err
	}
	u, err := k.client.Resource(r).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return kubeError(err)
	}
	u.SetManagedFields(nil)
	if a.json {
		return a.printJSON(u.Object)
	}
	b, err := yaml.Marshal(u.Object)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	_, err = a.stdout.Write(b)
	return err
}

func as[T any](u *unstructured.Unstructured) (T, error) {
	var v T
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &v); err != nil {
		return v, fmt.Errorf("read %s %s: %w", u.GetKind(), u.GetName(), err)
	}
	return v, nil
}

// kubeError gives an error of the API its kind; the message stays.
func kubeError(err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err):
		return errs.Public(errs.ErrNotFound, err.Error())
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return errs.Public(errs.ErrConflict, err.Error())
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return errs.Public(errs.ErrInvalid, err.Error())
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return errs.Public(errs.ErrForbidden, err.Error())
	}
	return fmt.Errorf("kubernetes API: %w", err)
}

// rmCommand removes objects of a kind. A failure does not stop the others.
func (a *app) rmCommand(short string, of kind) *cobra.Command {
	var s scope
	what := strings.ToUpper(of.noun)
	cmd := &cobra.Command{Use: "rm " + what + "...", Short: short, Args: atLeast(what)}
	s.flags(cmd, false)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		k, err := a.kube(cmd.Context())
		if err != nil {
			return err
		}
		return k.remove(cmd.Context(), a.stdout, of, s.namespace, args)
	}
	return cmd
}

// remove deletes the named objects, and prints the names.
func (k *kube) remove(ctx context.Context, out io.Writer, of kind, namespace string, texts []string) error {
	var failed []error
	for _, text := range texts {
		name, err := k.nameOf(ctx, of, namespace, text)
		if err == nil {
			err = kubeError(k.client.Resource(of.GroupVersionResource).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{}))
		}
		if err != nil {
			failed = append(failed, of.missing(err, namespace, text))
			continue
		}
		fmt.Fprintln(out, text)
	}
	return errors.Join(failed...)
}
