package resources

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// TemplateCommand returns `barchan template`.
func TemplateCommand(a *app.App) *cobra.Command {
	return app.NounCommand("template", "Blueprints of sandboxes", templateHistoryCommand(a), templateLsCommand(a),
		a.RemoveCommand("Delete templates; sandboxes of them stay", app.TemplateKind()), templateShowCommand(a))
}

func templateLsCommand(a *app.App) *cobra.Command {
	return app.ListCommand(a, app.Lister[extensions.SandboxTemplate]{
		Short: "List templates",
		Long:  "List the templates that a namespace can use: its own, and the public ones of " + app.PublicNamespace + ".",
		Find:  usableTemplates,
		Columns: app.Columns[extensions.SandboxTemplate]{
			Header: []string{"NAMESPACE", "ID", "NAME", "IMAGE", "RUNTIME", "CPU", "MEMORY", "AGE", "ALIASES"},
			Row:    templateRow,
		},
	})
}

// usableTemplates returns a namespace's own templates and the public ones; without a namespace, all.
func usableTemplates(ctx context.Context, k *app.Kube, namespace string) ([]extensions.SandboxTemplate, error) {
	list, err := app.List[extensions.SandboxTemplate](ctx, k, app.TemplatesResource, namespace)
	if err != nil || namespace == metav1.NamespaceAll || namespace == app.PublicNamespace {
		return list, err
	}
	public, err := app.List[extensions.SandboxTemplate](ctx, k, app.TemplatesResource, app.PublicNamespace)
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
	name, tag := t.NameAndTag()
	if tag != agents.DefaultTag {
		name += ":" + tag
	}
	return []string{t.Namespace, pool.TemplateID(t), name, image, runtimeClass, cpu, memory, terminal.Since(t.CreationTimestamp.Time), aliases}
}

func templateShowCommand(a *app.App) *cobra.Command {
	cmd := a.JSONFlag(&cobra.Command{Use: "show TEMPLATE", Short: "Show one template, as `apply` takes it"})
	return a.ObjectCommand(cmd, func(ctx context.Context, k *app.Kube, namespace, text string) error {
		t, err := k.Template(ctx, namespace, text)
		if err != nil {
			return err
		}
		return a.ShowObject(ctx, k, app.TemplatesResource, t.Namespace, t.Name)
	})
}

func templateHistoryCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "history TEMPLATE", Short: "List the revisions of one template",
		Long: "List the revisions of one template, the first first. A revision is the hash of all that decides what a sandbox\n" +
			"runs; the current one, marked by *, is the only one that claims get.",
	}
	a.ListFlags(cmd)
	return a.ObjectCommand(cmd, func(ctx context.Context, k *app.Kube, namespace, text string) error {
		t, err := k.Template(ctx, namespace, text)
		if err != nil {
			return err
		}
		list, err := app.List[barchan.TemplateRevision](ctx, k, app.RevisionsResource, t.Namespace)
		if err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(r barchan.TemplateRevision) bool { return !ofTemplate(&r, &t) })
		slices.SortFunc(list, func(x, y barchan.TemplateRevision) int { return cmp.Compare(x.Spec.Number, y.Spec.Number) })
		return printHistory(a, &t, list)
	})
}

// ofTemplate reports whether a revision belongs to this template, and not to an earlier one of the
// same name.
func ofTemplate(r *barchan.TemplateRevision, t *extensions.SandboxTemplate) bool {
	owner := metav1.GetControllerOf(r)
	return r.Spec.TemplateName == t.Name && (owner == nil || owner.UID == t.UID)
}

func printHistory(a *app.App, t *extensions.SandboxTemplate, list []barchan.TemplateRevision) error {
	current, _, err := pool.Revision(t)
	if err != nil {
		return err
	}
	return app.PrintList(a, app.Columns[barchan.TemplateRevision]{
		Header: []string{"NUMBER", "REVISION", "AGE", "CURRENT", "NAME"},
		Wide:   1,
		Row: func(r *barchan.TemplateRevision) []string {
			mark := ""
			if r.Spec.Revision == current {
				mark = "*"
			}
			return []string{fmt.Sprint(r.Spec.Number), short(r.Spec.Revision), terminal.Since(r.CreationTimestamp.Time), mark, r.Name}
		},
	}, list)
}
