package resources

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// limit is a quota of a namespace. The annotations are those of package quota of the control plane.
type limit struct {
	flag, doc string
	quantity  bool
}

func limits() []limit {
	return []limit{
		{"sandboxes", "running sandboxes", false},
		{"creates", "new sandboxes a second", false},
		{"cpu", "CPUs of running sandboxes, such as 2.5", true},
		{"memory", "memory of running sandboxes, such as 16Gi", true},
		{"volumes", "volumes", false},
		{"volume-capacity", "sum of the capacities of volumes", true},
		{"stored", "sizes of snapshots, and of the memory of paused sandboxes on disk", true},
		{"contents", "sum of the sizes of all objects, each 4Ki or more", true},
		{"templates", "templates, each tag being one", false},
		{"snapshots", "snapshots, the layers of builds included", false},
		{"builds", "template builds that have not ended", false},
		{"webhooks", "webhooks", false},
		{"keys", "API keys", false},
	}
}

// byDefault returns the limit of a namespace without its own.
func (l limit) byDefault(quotas map[string]string) string {
	if quotas == nil { // of a server that is not this machine's
		return "default"
	}
	return cmp.Or(quotas[l.flag], "any") + " (default)"
}

func (l limit) annotation() string { return "barchan.dev/quota-" + l.flag }

// QuotaCommand returns `barchan quota`.
func QuotaCommand(a *app.App) *cobra.Command {
	return app.NounCommand("quota", "Limits of namespaces", quotaShowCommand(a), quotaSetCommand(a))
}

func quotaShowCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "show NAMESPACE", Short: "Show the limits and the use of a namespace",
		Long: "Show the limits of a namespace, and the use of what its objects tell. A limit without a value of its own is marked\nas the default, that of the server's settings; with --kubeconfig or BARCHAN_KUBECONFIG the value is not known.",
	}
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		k, err := a.Kube(cmd.Context())
		if err != nil {
			return err
		}
		ns, err := k.Client.Resource(app.NamespacesResource).Get(cmd.Context(), args[0], metav1.GetOptions{})
		if err != nil {
			return noNamespace(err, args[0])
		}
		set := map[string]string{}
		for _, l := range limits() {
			if value, is := ns.GetAnnotations()[l.annotation()]; is {
				set[l.flag] = value
			}
		}
		used, err := use(cmd.Context(), k, args[0])
		if err != nil {
			return err
		}
		if a.JSON {
			shown := map[string]any{"limits": set, "used": used}
			if k.Quotas != nil {
				shown["defaults"] = k.Quotas
			}
			return a.PrintJSON(shown)
		}
		tab := terminal.NewTable("LIMIT", "VALUE", "USED", "OF")
		for _, l := range limits() {
			shown := "-"
			if n, counted := used[l.flag]; counted {
				shown = strconv.FormatInt(n, 10)
				if l.quantity {
					shown = terminal.Size(n)
				}
			}
			tab.Add(l.flag, cmp.Or(set[l.flag], l.byDefault(k.Quotas)), shown, l.doc)
		}
		tab.Write(a.Stdout)
		return nil
	}
	return cmd
}

// use returns what the objects of a namespace use of the limits, by their flags. Sizes are in bytes.
func use(ctx context.Context, k *app.Kube, namespace string) (map[string]int64, error) {
	boxes, err := app.List[agents.Sandbox](ctx, k, app.SandboxesResource, namespace)
	if err != nil {
		return nil, err
	}
	snapshots, err := app.List[barchan.Checkpoint](ctx, k, app.CheckpointsResource, namespace)
	if err != nil {
		return nil, err
	}
	builds, err := app.List[barchan.TemplateBuild](ctx, k, app.BuildsResource, namespace)
	if err != nil {
		return nil, err
	}
	used := map[string]int64{"stored": 0, "snapshots": int64(len(snapshots)), "builds": 0}
	for i := range boxes {
		if b := boxes[i].Status.Barchan; b != nil && b.MemorySize != nil {
			used["stored"] += b.MemorySize.Value()
		}
	}
	for i := range snapshots {
		if size := snapshots[i].Status.Size; size != nil {
			used["stored"] += size.Value()
		}
	}
	for i := range builds {
		if !builds[i].Ended() {
			used["builds"]++
		}
	}
	for flag, of := range map[string]struct {
		schema.GroupVersionResource
		label string
	}{"templates": {app.TemplatesResource, ""}, "webhooks": {app.SecretsResource, barchan.LabelWebhook}, "keys": {app.KeysResource, ""}} {
		list, err := k.Client.Resource(of.GroupVersionResource).Namespace(namespace).List(ctx, metav1.ListOptions{LabelSelector: of.label})
		if err != nil {
			return nil, kubeobjects.Error(err)
		}
		used[flag] = int64(len(list.Items))
	}
	return used, nil
}

func quotaSetCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "set NAMESPACE", Short: "Set limits of a namespace",
		Long:    "Set limits of a namespace; those that are not named stay. The value default has the server's settings apply again.",
		Example: "  barchan quota set team-a --sandboxes 20 --memory 16Gi --creates default",
	}
	values := map[string]*string{}
	for _, l := range limits() {
		values[l.flag] = cmd.Flags().String(l.flag, "", l.doc+", or default")
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		set := map[string]*string{}
		for _, l := range limits() {
			value := *values[l.flag]
			switch {
			case !cmd.Flags().Changed(l.flag):
				continue
			case value == "default":
				set[l.annotation()] = nil
				continue
			}
			if err := l.check(value); err != nil {
				return app.Usage(cmd, fmt.Errorf("--%s: %w", l.flag, err))
			}
			set[l.annotation()] = &value
		}
		if len(set) == 0 {
			return app.Usage(cmd, errors.New("no limit is named"))
		}
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": set}})
		if err != nil {
			return err
		}
		k, err := a.Kube(cmd.Context())
		if err != nil {
			return err
		}
		_, err = k.Client.Resource(app.NamespacesResource).Patch(cmd.Context(), args[0], types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kubeobjects.FieldManager})
		return noNamespace(err, args[0])
	}
	return cmd
}

// noNamespace is kubeobjects.Error, with a text for a missing namespace.
func noNamespace(err error, name string) error {
	err = kubeobjects.Error(err)
	if errors.Is(err, errs.ErrNotFound) {
		return errs.Public(err, fmt.Sprintf("namespace %[1]q not found; `barchan key create -n %[1]s` makes one", name))
	}
	return err
}

// check refuses what the server would take for a mistake, and then allow nothing.
func (l limit) check(value string) error {
	q, err := resource.ParseQuantity(value)
	if err != nil || q.Sign() < 0 {
		if l.quantity {
			return fmt.Errorf("%q is not an amount of 0 or more, such as 2.5 or 16Gi", value)
		}
		return fmt.Errorf("%q is not a whole number of 0 or more", value)
	}
	if n, whole := q.AsInt64(); !l.quantity && (!whole || fmt.Sprint(n) != value) {
		return fmt.Errorf("%q is not a whole number", value)
	}
	return nil
}
