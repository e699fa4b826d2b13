package resources

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/client/cli/app"
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
		{"stored", "sum of the sizes of snapshots", true},
	}
}

func (l limit) annotation() string { return "barchan.dev/quota-" + l.flag }

// QuotaCommand returns `barchan quota`.
func QuotaCommand(a *app.App) *cobra.Command {
	return app.NounCommand("quota", "Limits of namespaces", quotaShowCommand(a), quotaSetCommand(a))
}

func quotaShowCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "show NAMESPACE", Short: "Show the limits of a namespace",
		Long: "Show the limits of a namespace. One without a value of its own has that of the server's settings: barchan config.",
		Args: cobra.ExactArgs(1),
	}
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		k, err := a.Kube(cmd.Context())
		if err != nil {
			return err
		}
		ns, err := k.Client.Resource(app.NamespacesResource).Get(cmd.Context(), args[0], metav1.GetOptions{})
		if err != nil {
			return kubeobjects.Error(err)
		}
		set := map[string]string{}
		for _, l := range limits() {
			if value, is := ns.GetAnnotations()[l.annotation()]; is {
				set[l.flag] = value
			}
		}
		if a.JSON {
			return a.PrintJSON(set)
		}
		for _, l := range limits() {
			value, is := set[l.flag]
			if !is {
				value = "default"
			}
			fmt.Fprintf(a.Stdout, "%-16s %-10s %s\n", l.flag, value, l.doc)
		}
		return nil
	}
	return cmd
}

func quotaSetCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "set NAMESPACE", Short: "Set limits of a namespace",
		Long:    "Set limits of a namespace; those that are not named stay. The value default has the server's settings apply again.",
		Example: "  barchan quota set team-a --sandboxes 20 --memory 16Gi --creates default",
		Args:    cobra.ExactArgs(1),
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
		return kubeobjects.Error(err)
	}
	return cmd
}

// check refuses what the server would take for a mistake, and then allow nothing.
func (l limit) check(value string) error {
	q, err := resource.ParseQuantity(value)
	if err != nil || q.Sign() < 0 {
		return fmt.Errorf("%q is not 0 or more", value)
	}
	if n, whole := q.AsInt64(); !l.quantity && (!whole || fmt.Sprint(n) != value) {
		return fmt.Errorf("%q is not a whole number", value)
	}
	return nil
}
