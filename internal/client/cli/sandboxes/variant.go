package sandboxes

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// variant has one sandbox's deviations from its template. E2B's REST API creates from templates alone,
// so it becomes a temporary template, until the sandbox has been created.
type variant struct {
	image  string
	limits corev1.ResourceList
}

func parseVariant(image, memory, cpu string) (variant, error) {
	v := variant{image: image, limits: corev1.ResourceList{}}
	for _, l := range []struct {
		flag, text string
		name       corev1.ResourceName
	}{{"--memory", memory, corev1.ResourceMemory}, {"--cpu", cpu, corev1.ResourceCPU}} {
		if l.text == "" {
			continue
		}
		q, err := resource.ParseQuantity(l.text)
		if err != nil || q.Sign() <= 0 {
			return v, fmt.Errorf("%s: %q is not a quantity such as 512Mi or 2: %w", l.flag, l.text, errs.ErrInvalid)
		}
		v.limits[l.name] = q
	}
	return v, nil
}

func (v variant) none() bool { return v.image == "" && len(v.limits) == 0 }

// of returns the template with the deviations of v, which is not listed.
func (v variant) of(t *extensions.SandboxTemplate, namespace string) (*extensions.SandboxTemplate, error) {
	out := &extensions.SandboxTemplate{
		TypeMeta:   metav1.TypeMeta{APIVersion: extensions.GroupVersion.String(), Kind: "SandboxTemplate"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "run-" + strings.ToLower(rand.Text()[:12])},
	}
	t.Spec.DeepCopyInto(&out.Spec)
	if b := out.Spec.Barchan; b != nil {
		b.Aliases, b.Public = nil, false
	}
	containers := out.Spec.PodTemplate.Spec.Containers
	if len(containers) == 0 {
		return nil, fmt.Errorf("template %s: has no container: %w", t.Name, errs.ErrInvalid)
	}
	c := &containers[0]
	if v.image != "" {
		c.Image = v.image
	}
	for name, q := range v.limits {
		if c.Resources.Limits == nil {
			c.Resources.Limits = corev1.ResourceList{}
		}
		c.Resources.Limits[name] = q
		delete(c.Resources.Requests, name) // they could exceed the limits
	}
	return out, nil
}

// inFlags names the flags in the place of the fields of a template that they set.
func inFlags(text string) string {
	const container = "spec.podTemplate.spec.containers[0]."
	return strings.NewReplacer(container+"image", "--image", container+"resources.limits[memory]", "--memory", container+"resources.limits[cpu]", "--cpu").Replace(text)
}

// createVariant creates a sandbox of a temporary template, which is removed afterwards: a sandbox does
// not need its template.
func createVariant(ctx context.Context, a *app.App, t *app.Server, n client.CreateOptions, v variant) (s *client.Sandbox, err error) {
	k, err := a.Kube(ctx)
	if err != nil {
		return s, fmt.Errorf("--image, --memory and --cpu need the Kubernetes API: %w", err)
	}
	namespace, err := t.REST.Namespace(ctx)
	if err != nil {
		return s, err
	}
	like, err := k.Template(ctx, namespace, n.TemplateID)
	if err != nil {
		return s, err
	}
	own, err := v.of(&like, namespace)
	if err != nil {
		return s, err
	}
	if err := k.Create(ctx, app.TemplatesResource, own); errors.Is(err, errs.ErrInvalid) {
		return s, errs.Public(err, inFlags(app.Message(err)))
	} else if err != nil {
		return s, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killWithin)
		defer cancel()
		if e := k.Client.Resource(app.TemplatesResource).Namespace(namespace).Delete(ctx, own.Name, metav1.DeleteOptions{}); e != nil {
			fmt.Fprintf(a.Stderr, "barchan: template %s/%s could not be removed: %v\n", namespace, own.Name, kubeobjects.Error(e))
		}
	}()
	n.TemplateID = own.Name
	for until := time.Now().Add(app.SettleTime); ; time.Sleep(app.PollInterval) { // until the server's cache has the template
		s, err = t.REST.Create(ctx, n)
		if !errors.Is(err, errs.ErrNotFound) || time.Now().After(until) {
			return s, err
		}
	}
}
