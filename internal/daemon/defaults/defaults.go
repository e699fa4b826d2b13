// Package defaults makes the objects and files that a new server starts with: base template, its pool, the template for E2B's option `mcp`, the local API key, secrets.
//
// It changes nothing that exists, but for the image of the code interpreter's template, which a command makes.
package defaults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/guest/mcpgateway"
)

const (
	localKeyName      = "local-cli"
	localKeyNamespace = metav1.NamespaceDefault
)

// Make creates the missing ones of: the base template, its pool in the namespace of the local command line, the template for E2B's
// option `mcp`, and the local API key.
func Make(ctx context.Context, cfg *config.Config, as *rest.Config) error {
	scheme, err := cache.NewScheme()
	if err != nil {
		return err
	}
	api, err := client.New(as, client.Options{Scheme: scheme})
	if err != nil {
		return fmt.Errorf("make the API client: %w", err)
	}
	if err := ensure(ctx, api, baseTemplate(cfg)); err != nil {
		return fmt.Errorf("make template %s: %w", cfg.DefaultTemplate, err)
	}
	if err := ensure(ctx, api, mcpTemplate(cfg)); err != nil {
		return fmt.Errorf("make template %s: %w", mcpgateway.Program, err)
	}
	if cfg.PoolSize > 0 {
		if err := ensure(ctx, api, poolOf(cfg, cfg.DefaultTemplate)); err != nil {
			return fmt.Errorf("make pool %s: %w", cfg.DefaultTemplate, err)
		}
	}
	return ensureLocalKey(ctx, cfg, api)
}

// ensure creates a missing object. It reads first, so that a server boots over a read-only store that has the object.
func ensure(ctx context.Context, api client.Client, obj client.Object) error {
	err := api.Get(ctx, client.ObjectKeyFromObject(obj), obj.DeepCopyObject().(client.Object))
	if !apierrors.IsNotFound(err) {
		return err
	}
	if err := api.Create(ctx, obj); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

func baseTemplate(cfg *config.Config) *extensions.SandboxTemplate {
	limits := corev1.ResourceList{corev1.ResourceCPU: cfg.SandboxCPU, corev1.ResourceMemory: cfg.SandboxMemory}
	return &extensions.SandboxTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: templates.PublicNamespace, Name: cfg.DefaultTemplate},
		Spec: extensions.SandboxTemplateSpec{
			SandboxBlueprint: agents.SandboxBlueprint{PodTemplate: agents.PodTemplate{Spec: corev1.PodSpec{
				Containers: []corev1.Container{{
					Name: "sandbox", Image: cfg.BaseImageRef,
					Resources: corev1.ResourceRequirements{Limits: limits},
				}},
			}}},
			Barchan: &extensions.TemplateBarchanSpec{Public: true},
		},
	}
}

// mcpTemplate returns the template that E2B's SDKs use for the option `mcp`: the base image has the program that they run.
func mcpTemplate(cfg *config.Config) *extensions.SandboxTemplate {
	t := baseTemplate(cfg)
	t.Name = mcpgateway.Program
	return t
}

// poolOf returns a pool of a public template, in the namespace of the local command line.
func poolOf(cfg *config.Config, template string) *extensions.SandboxWarmPool {
	size := int32(cfg.PoolSize) //nolint:gosec // bounded by Validate
	return &extensions.SandboxWarmPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: localKeyNamespace, Name: template},
		Spec: extensions.SandboxWarmPoolSpec{
			Replicas:           &size,
			SandboxTemplateRef: extensions.SandboxTemplateRef{Name: template},
			Barchan:            &extensions.WarmPoolBarchanSpec{TemplateNamespace: templates.PublicNamespace},
		},
	}
}

// ensureLocalKey makes the key that `barchan env` prints. The file has the key, the object its hash; if either is missing, a
// new pair replaces both.
func ensureLocalKey(ctx context.Context, cfg *config.Config, api client.Client) error {
	path := cfg.APIKeyFile()
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the local API key: %w", err)
	}
	key := strings.TrimSpace(string(text))
	have := &barchan.APIKey{}
	err = api.Get(ctx, client.ObjectKey{Namespace: localKeyNamespace, Name: localKeyName}, have)
	if err == nil && key != "" && have.Spec.SHA256 == barchan.HashKey(key) {
		return nil
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read the local API key's object: %w", err)
	}
	found := err == nil
	key = barchan.NewKeySecret()
	if err := WriteSecret(path, []byte(key+"\n")); err != nil {
		return err
	}
	have.Namespace, have.Name = localKeyNamespace, localKeyName
	have.Spec = barchan.NewAPIKeySpec(key, "the command line on this machine")
	if found {
		err = api.Update(ctx, have)
	} else {
		err = api.Create(ctx, have)
	}
	if err != nil {
		return fmt.Errorf("store the local API key's hash: %w", err)
	}
	return nil
}
