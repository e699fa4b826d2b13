package app

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
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
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// The resources of the API that commands use.
var (
	TemplatesResource   = extensions.GroupVersion.WithResource("sandboxtemplates")
	PoolsResource       = extensions.GroupVersion.WithResource("sandboxwarmpools")
	SandboxesResource   = agents.GroupVersion.WithResource("sandboxes")
	RevisionsResource   = barchan.GroupVersion.WithResource("templaterevisions")
	CheckpointsResource = barchan.GroupVersion.WithResource("checkpoints")
	BuildsResource      = barchan.GroupVersion.WithResource("templatebuilds")
	KeysResource        = barchan.GroupVersion.WithResource("apikeys")
	EventsResource      = corev1.SchemeGroupVersion.WithResource("events")
	SecretsResource     = corev1.SchemeGroupVersion.WithResource("secrets")
	NamespacesResource  = corev1.SchemeGroupVersion.WithResource("namespaces")
)

// Kube is a client of the Kubernetes API.
type Kube struct {
	Config *rest.Config
	Client dynamic.Interface
	// Quotas are [adminclient.Status.Quotas] of the local server; nil with another one's kubeconfig.
	Quotas map[string]string
}

// Kube returns a client of the given kubeconfig's API, or of the local server's.
func (a *App) Kube(ctx context.Context) (*Kube, error) {
	var quotas map[string]string
	file := a.First(a.Kubeconfig, envKubeconfig)
	if file == "" {
		s, err := a.LocalServer(ctx)
		if err != nil {
			return nil, forOthers(err, "name the server's kubeconfig by "+envKubeconfig)
		}
		file, quotas = s.Addresses.Kubeconfig, s.Quotas
	}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: file}, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w: %w", file, err, errs.ErrInvalid)
	}
	cfg.UserAgent = "barchan/" + a.Version().Version
	cfg.QPS, cfg.Burst = -1, 0 // the server has its own limits
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", file, err)
	}
	return &Kube{Config: cfg, Client: client, Quotas: quotas}, nil
}

// Scope is the namespace of a command.
type Scope struct {
	Namespace string
	All       bool
}

// Flags adds --namespace, and -A if a command may list all.
func (s *Scope) Flags(cmd *cobra.Command, all bool) {
	cmd.Flags().StringVarP(&s.Namespace, "namespace", "n", metav1.NamespaceDefault, "namespace, E2B's team; with a key given, the key's own")
	if all {
		cmd.Flags().BoolVarP(&s.All, "all-namespaces", "A", false, "of all namespaces")
	}
}

// ChooseNamespace sets a command's namespace, if none is given, to that of the given key. Without a
// key it is the default one, as for the key of the data directory.
func (a *App) ChooseNamespace(ctx context.Context, cmd *cobra.Command) error {
	flag := cmd.Flags().Lookup("namespace")
	if flag == nil || flag.DefValue == "" || flag.Changed || a.givenKey() == "" {
		return nil
	}
	return a.WithServer(ctx, func(t *Server) error {
		namespace, err := t.REST.Namespace(ctx)
		if err != nil {
			return fmt.Errorf("find the namespace of the key; --namespace names another: %w", err)
		}
		return flag.Value.Set(namespace)
	})
}

// List returns the namespace to list; empty means all.
func (s *Scope) List() string {
	if s.All {
		return metav1.NamespaceAll
	}
	return s.Namespace
}

// List reads all objects of a resource as T.
func List[T any](ctx context.Context, k *Kube, r schema.GroupVersionResource, namespace string) ([]T, error) {
	list, err := k.Client.Resource(r).Namespace(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, kubeobjects.Error(err)
	}
	out := make([]T, len(list.Items))
	for i := range list.Items {
		list.Items[i].SetManagedFields(nil)
		if out[i], err = Decode[T](&list.Items[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Get reads one object as T.
func Get[T any](ctx context.Context, k *Kube, r schema.GroupVersionResource, namespace, name string) (T, error) {
	u, err := k.Client.Resource(r).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		var none T
		return none, kubeobjects.Error(err)
	}
	return Decode[T](u)
}

// Create creates an object, without its status, which the server writes.
func (k *Kube) Create(ctx context.Context, r schema.GroupVersionResource, object metav1.Object) error {
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return fmt.Errorf("encode %s: %w", object.GetName(), err)
	}
	delete(content, "status")
	_, err = k.Client.Resource(r).Namespace(object.GetNamespace()).
		Create(ctx, &unstructured.Unstructured{Object: content}, metav1.CreateOptions{FieldManager: kubeobjects.FieldManager})
	return kubeobjects.Error(err)
}

// ShowObject prints one object as YAML or JSON.
func (a *App) ShowObject(ctx context.Context, k *Kube, r schema.GroupVersionResource, namespace, name string) error {
	u, err := k.Client.Resource(r).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return kubeobjects.Error(err)
	}
	u.SetManagedFields(nil)
	if a.JSON {
		return a.PrintJSON(u.Object)
	}
	b, err := yaml.Marshal(u.Object)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	_, err = a.Stdout.Write(b)
	return err
}

// Decode converts an object to its type.
func Decode[T any](u *unstructured.Unstructured) (T, error) {
	var v T
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &v); err != nil {
		return v, fmt.Errorf("read %s %s: %w", u.GetKind(), u.GetName(), err)
	}
	return v, nil
}

// ObjectCommand completes a command on one object of a namespace, by its ID or name.
func (a *App) ObjectCommand(cmd *cobra.Command, work func(ctx context.Context, k *Kube, namespace, text string) error) *cobra.Command {
	var s Scope
	s.Flags(cmd, false)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.WithKube(cmd.Context(), func(k *Kube) error { return work(cmd.Context(), k, s.Namespace, args[0]) })
	}
	return cmd
}

// RemoveCommand removes objects of a kind. A failure does not stop the others.
func (a *App) RemoveCommand(short string, of Kind) *cobra.Command {
	var s Scope
	what := strings.ToUpper(of.Noun)
	cmd := &cobra.Command{Use: "rm " + what + "...", Short: short}
	s.Flags(cmd, false)
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.RemoveObjects(cmd.Context(), of, s.Namespace, args)
	}
	return cmd
}

// RemoveObjects deletes objects by ID or name, and prints what was given. A failure does not stop the others.
func (a *App) RemoveObjects(ctx context.Context, of Kind, namespace string, texts []string) error {
	return a.WithKube(ctx, func(k *Kube) error {
		return a.Each(texts, func(text string) (string, error) {
			name, err := k.nameOf(ctx, of, namespace, text)
			if err == nil {
				err = kubeobjects.Error(k.Client.Resource(of.GroupVersionResource).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{}))
			}
			return text, of.Missing(err, namespace, text)
		})
	})
}
