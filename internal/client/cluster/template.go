package cluster

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// Template describes the template that E2B's clients use where they name none.
type Template struct {
	Image        string
	RuntimeClass string // empty: the installation's
	CPU, Memory  resource.Quantity
}

// templateName is E2B's default.
const templateName = "base"

// CountTemplates returns how many templates the cluster has.
func (c *Cluster) CountTemplates(ctx context.Context) (int, error) {
	return c.count(ctx, extensions.GroupVersion.WithResource("sandboxtemplates"))
}

// ApplyTemplate creates or changes the template of all tenants. Its program waits, and ends at a SIGTERM.
func (c *Cluster) ApplyTemplate(ctx context.Context, t Template) error {
	grace := int64(1)
	var class *string
	if t.RuntimeClass != "" {
		class = &t.RuntimeClass
	}
	object := &extensions.SandboxTemplate{
		TypeMeta:   metav1.TypeMeta{APIVersion: extensions.GroupVersion.String(), Kind: "SandboxTemplate"},
		ObjectMeta: metav1.ObjectMeta{Namespace: c.cfg.Namespace, Name: templateName, Labels: map[string]string{managedBy: managedByUs}},
		Spec: extensions.SandboxTemplateSpec{
			SandboxBlueprint: agents.SandboxBlueprint{PodTemplate: agents.PodTemplate{Spec: corev1.PodSpec{
				RuntimeClassName: class, TerminationGracePeriodSeconds: &grace,
				Containers: []corev1.Container{{
					Name: "sandbox", Image: t.Image, Command: []string{"/bin/sh", "-c", `trap "exit 0" TERM; sleep infinity & wait`},
					Resources: corev1.ResourceRequirements{
						// Most sandboxes rest most of the time: nodes are packed by memory.
						Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: t.Memory},
						Limits:   corev1.ResourceList{corev1.ResourceCPU: t.CPU, corev1.ResourceMemory: t.Memory},
					},
				}},
			}}},
			Barchan: &extensions.TemplateBarchanSpec{Public: true},
		},
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return fmt.Errorf("encode the template: %w", err)
	}
	delete(content, "status")
	u := &unstructured.Unstructured{Object: content}
	did, err := c.objects.Apply(ctx, u, kubeobjects.Options{Force: true})
	if err != nil {
		return fmt.Errorf("apply %s: %w", kubeobjects.ID(u), err)
	}
	c.report("template", "%s %s", kubeobjects.ID(u), did)
	return nil
}
