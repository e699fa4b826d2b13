package cli

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

func (a *app) templateCommand() *cobra.Command {
	return nounCommand("template", "Blueprints of sandboxes", a.templateLsCommand(), a.templateShowCommand())
}

func (a *app) templateLsCommand() *cobra.Command {
	var s scope
	cmd := &cobra.Command{
		Use: "ls", Short: "List templates",
		Long: "List the templates that a namespace can use: its own, and the public ones of " + publicNamespace + ".",
		Args: exactly(),
	}
	s.flags(cmd, true)
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		k, err := a.kube(cmd.Context())
		if err != nil {
			return err
		}
		list, err := usableTemplates(cmd.Context(), k, s.list())
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(list)
		}
		tab := newTable("NAMESPACE", "NAME", "IMAGE", "RUNTIME", "CPU", "MEMORY", "AGE", "ALIASES")
		for _, t := range list {
			tab.add(templateRow(t)...)
		}
		tab.write(a.stdout)
		return nil
	}
	return cmd
}

// publicNamespace has the templates that every namespace can use.
const publicNamespace = "barchan-system"

// usableTemplates are a namespace's own templates and the public ones; of all namespaces, all.
func usableTemplates(ctx context.Context, k *kube, namespace string) ([]extensions.SandboxTemplate, error) {
	list, err := listAs[extensions.SandboxTemplate](ctx, k, templatesResource(), namespace)
	if err != nil || namespace == metav1.NamespaceAll || namespace == publicNamespace {
		return list, err
	}
	public, err := listAs[extensions.SandboxTemplate](ctx, k, templatesResource(), publicNamespace)
	if err != nil {
		return nil, err
	}
	for _, t := range public {
		if t.Spec.Barchan != nil && t.Spec.Barchan.Public {
			list = append(list, t)
		}
	}
	return list, nil
}

func templateRow(t extensions.SandboxTemplate) []string {
	spec := t.Spec.PodTemplate.Spec
	image, cpu, memory := "-", "-", "-"
	if len(spec.Containers) > 0 {
		c := spec.Containers[0]
		image = c.Image
		if q, ok := c.Resources.Limits[corev1.ResourceCPU]; ok {
			cpu = q.String()
		}
		if q, ok := c.Resources.Limits[corev1.ResourceMemory]; ok {
			memory = q.String()
		}
	}
	runtimeClass := agents.RuntimeGVisor
	if spec.RuntimeClassName != nil {
		runtimeClass = *spec.RuntimeClassName
	}
	aliases := ""
	if t.Spec.Barchan != nil {
		aliases = strings.Join(t.Spec.Barchan.Aliases, " ")
	}
	return []string{t.Namespace, t.Name, image, runtimeClass, cpu, memory, since(t.CreationTimestamp.Time), aliases}
}

func (a *app) templateShowCommand() *cobra.Command {
	var s scope
	cmd := &cobra.Command{Use: "show NAME", Short: "Show one template, as `apply` takes it", Args: exactly("NAME")}
	s.flags(cmd, false)
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.showObject(cmd.Context(), templatesResource(), s.namespace, args[0])
	}
	return cmd
}
