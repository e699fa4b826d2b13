package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	goruntime "runtime"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
	"github.com/barchan-dev/barchan/internal/node/egress"
)

const (
	localKeyName      = "local-cli"
	localKeyNamespace = metav1.NamespaceDefault
)

// makeDefaults makes the objects without which the quick start could not be quick: the base
// template, its pool in the namespace of the local command line, and the key of that. What a user changed or removed later is
// made again only where it is missing.
func (d *Daemon) makeDefaults(ctx context.Context) error {
	scheme, err := cache.NewScheme()
	if err != nil {
		return err
	}
	api, err := client.New(d.api.RESTConfig(apiserver.UserAdmin), client.Options{Scheme: scheme})
	if err != nil {
		return fmt.Errorf("make the API client: %w", err)
	}
	if err := ensure(ctx, api, d.baseTemplate()); err != nil {
		return fmt.Errorf("make template %s: %w", d.cfg.DefaultTemplate, err)
	}
	if d.cfg.PoolSize > 0 {
		if err := ensure(ctx, api, d.basePool()); err != nil {
			return fmt.Errorf("make pool %s: %w", d.cfg.DefaultTemplate, err)
		}
	}
	return d.ensureLocalKey(ctx, api)
}

// ensure makes an object that is missing. It looks first: a store that takes no writes is no
// reason not to boot over what is there.
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

func (d *Daemon) baseTemplate() *extensions.SandboxTemplate {
	limits := corev1.ResourceList{corev1.ResourceCPU: d.cfg.SandboxCPU, corev1.ResourceMemory: d.cfg.SandboxMemory}
	return &extensions.SandboxTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: manager.DefaultPublicNamespace, Name: d.cfg.DefaultTemplate},
		Spec: extensions.SandboxTemplateSpec{
			SandboxBlueprint: agents.SandboxBlueprint{PodTemplate: agents.PodTemplate{Spec: corev1.PodSpec{
				Containers: []corev1.Container{{
					Name: "sandbox", Image: d.cfg.BaseImageRef,
					Resources: corev1.ResourceRequirements{Limits: limits},
				}},
			}}},
			Barchan: &extensions.TemplateBarchanSpec{Public: true},
		},
	}
}

func (d *Daemon) basePool() *extensions.SandboxWarmPool {
	size := int32(d.cfg.PoolSize) //nolint:gosec // bounded by Validate
	return &extensions.SandboxWarmPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: localKeyNamespace, Name: d.cfg.DefaultTemplate},
		Spec: extensions.SandboxWarmPoolSpec{
			Replicas:           &size,
			SandboxTemplateRef: extensions.SandboxTemplateRef{Name: d.cfg.DefaultTemplate},
			Barchan:            &extensions.WarmPoolBarchanSpec{TemplateNamespace: manager.DefaultPublicNamespace},
		},
	}
}

// ensureLocalKey makes the key that `barchan env` prints. The file has the key, the object its
// hash; whichever is missing makes a new pair.
func (d *Daemon) ensureLocalKey(ctx context.Context, api client.Client) error {
	path := d.cfg.APIKeyFile()
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
	if err := writeSecret(path, []byte(key+"\n")); err != nil {
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

// hostAdmission refuses what this machine could not run.
type hostAdmission struct {
	// machine is what there is of CPUs and memory.
	machine corev1.ResourceList
}

func newHostAdmission() (hostAdmission, error) {
	_, memory, err := hostcheck.ReadMemory()
	if err != nil {
		return hostAdmission{}, fmt.Errorf("find out how much memory this machine has: %w", err)
	}
	return hostAdmission{corev1.ResourceList{
		corev1.ResourceCPU: *resource.NewQuantity(int64(goruntime.NumCPU()), resource.DecimalSI), corev1.ResourceMemory: *resource.NewQuantity(memory, resource.BinarySI),
	}}, nil
}

// admit is an apiserver.AdmissionFunc; old is nil for what is new.
func (d hostAdmission) admit(_ context.Context, obj, old runtime.Object) field.ErrorList {
	pod := field.NewPath("spec", "podTemplate", "spec")
	switch o := obj.(type) {
	case *agents.Sandbox:
		errs := append(sandbox.CheckRunnable(&o.Spec.PodTemplate.Spec, pod), sandbox.CheckMounts(&o.Spec.SandboxBlueprint, pod)...)
		var before *corev1.PodSpec
		if was, isUpdate := old.(*agents.Sandbox); isUpdate {
			before = &was.Spec.PodTemplate.Spec
			errs = append(errs, sandbox.CheckChange(o, was, pod)...)
		}
		errs = append(errs, sandbox.CheckFits(&o.Spec.PodTemplate.Spec, before, d.machine, pod)...)
		if b := o.Spec.Barchan; b != nil && b.NetworkPolicy != nil {
			errs = append(errs, egress.CheckRules(b.NetworkPolicy.Egress, field.NewPath("spec", "barchan", "networkPolicy", "egress"))...)
		}
		return errs
	case *extensions.SandboxTemplate:
		errs := append(sandbox.CheckRunnable(&o.Spec.PodTemplate.Spec, pod), sandbox.CheckMounts(&o.Spec.SandboxBlueprint, pod)...)
		var before *corev1.PodSpec
		if was, isUpdate := old.(*extensions.SandboxTemplate); isUpdate {
			before = &was.Spec.PodTemplate.Spec
		}
		errs = append(errs, sandbox.CheckFits(&o.Spec.PodTemplate.Spec, before, d.machine, pod)...)
		if p := extensions.ManagedPolicy(o); p != nil {
			errs = append(errs, egress.CheckRules(p.Egress, field.NewPath("spec", "networkPolicy", "egress"))...)
		}
		return errs
	default:
		return nil
	}
}
