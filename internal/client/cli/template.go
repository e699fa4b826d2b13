package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

func (a *app) templateCommand() *cobra.Command {
	return nounCommand("template", "Blueprints of sandboxes", a.templateHistoryCommand(), a.templateLsCommand(),
		a.rmCommand("Delete templates; sandboxes of them stay", templateKind()), a.templateShowCommand())
}

func (a *app) templateLsCommand() *cobra.Command {
	return lsCommand(a, lister[extensions.SandboxTemplate]{
		short: "List templates",
		long:  "List the templates that a namespace can use: its own, and the public ones of " + publicNamespace + ".",
		find:  usableTemplates,
		columns: columns[extensions.SandboxTemplate]{
			header: []string{"NAMESPACE", "ID", "NAME", "IMAGE", "RUNTIME", "CPU", "MEMORY", "AGE", "ALIASES"},
			row:    templateRow,
		},
	})
}

// publicNamespace has the templates for every namespace.
const publicNamespace = "barchan-system"

// usableTemplates returns a namespace's own templates and the public ones; without a namespace, all.
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

func templateRow(t *extensions.SandboxTemplate) []string {
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
	return []string{t.Namespace, pool.TemplateID(t), t.Name, image, runtimeClass, cpu, memory, since(t.CreationTimestamp.Time), aliases}
}

// template finds a template for a namespace, its own or a public one, by its ID or its name.
func (k *kube) template(ctx context.Context, namespace, text string) (extensions.SandboxTemplate, error) {
	t, err := getNamed[extensions.SandboxTemplate](ctx, k, templateKind(), namespace, text)
	if err == nil || !errors.Is(err, errs.ErrNotFound) || namespace == publicNamespace {
		return t, err
	}
	public, publicErr := getNamed[extensions.SandboxTemplate](ctx, k, templateKind(), publicNamespace, text)
	switch {
	case publicErr == nil && public.Spec.Barchan != nil && public.Spec.Barchan.Public:
		return public, nil
	case publicErr != nil && !errors.Is(publicErr, errs.ErrNotFound):
		return t, publicErr
	}
	return t, err
}

func (a *app) templateShowCommand() *cobra.Command {
	var s scope
	cmd := &cobra.Command{Use: "show TEMPLATE", Short: "Show one template, as `apply` takes it", Args: exactly("TEMPLATE")}
	s.flags(cmd, false)
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		k, err := a.kube(cmd.Context())
		if err != nil {
			return err
		}
		t, err := k.template(cmd.Context(), s.namespace, args[0])
		if err != nil {
			return err
		}
		return a.showObject(cmd.Context(), templatesResource(), t.Namespace, t.Name)
	}
	return cmd
}

func (a *app) templateHistoryCommand() *cobra.Command {
	var s scope
	cmd := &cobra.Command{
		Use: "history TEMPLATE", Short: "List the revisions of one template",
		Long: "List the revisions of one template, the first first. A revision is the hash of all that decides what a sandbox\n" +
			"runs; the current one, marked by *, is the only one that claims get.",
		Args: exactly("TEMPLATE"),
	}
	s.flags(cmd, false)
	a.listFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		k, err := a.kube(cmd.Context())
		if err != nil {
			return err
		}
		t, err := k.template(cmd.Context(), s.namespace, args[0])
		if err != nil {
			return err
		}
		list, err := listAs[barchan.TemplateRevision](cmd.Context(), k, revisionsResource(), t.Namespace)
		if err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(r barchan.TemplateRevision) bool { return !ofTemplate(&r, &t) })
		slices.SortFunc(list, func(x, y barchan.TemplateRevision) int { return cmp.Compare(x.Spec.Number, y.Spec.Number) })
		return a.printHistory(&t, list)
	}
	return cmd
}

// ofTemplate reports whether a revision belongs to this template, and not to an earlier one of the
// same name.
func ofTemplate(r *barchan.TemplateRevision, t *extensions.SandboxTemplate) bool {
	owner := metav1.GetControllerOf(r)
	return r.Spec.TemplateName == t.Name && (owner == nil || owner.UID == t.UID)
}

func (a *app) printHistory(t *extensions.SandboxTemplate, list []barchan.TemplateRevision) error {
	current, _, err := pool.Revision(t)
	if err != nil {
		return err
	}
	return printList(a, columns[barchan.TemplateRevision]{
		header: []string{"NUMBER", "REVISION", "AGE", "CURRENT", "NAME"},
		wide:   1,
		row: func(r *barchan.TemplateRevision) []string {
			mark := ""
			if r.Spec.Revision == current {
				mark = "*"
			}
			return []string{fmt.Sprint(r.Spec.Number), short(r.Spec.Revision), since(r.CreationTimestamp.Time), mark, r.Name}
		},
	}, list)
}
