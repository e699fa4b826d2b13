package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

func (a *app) poolCommand() *cobra.Command {
	return nounCommand("pool", "Warm pools of ready sandboxes", a.poolLsCommand(), a.poolShowCommand(), a.poolScaleCommand())
}

func (a *app) poolLsCommand() *cobra.Command {
	var s scope
	cmd := &cobra.Command{Use: "ls", Short: "List warm pools", Args: exactly()}
	s.flags(cmd, true)
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		k, err := a.kube(cmd.Context())
		if err != nil {
			return err
		}
		list, err := listAs[extensions.SandboxWarmPool](cmd.Context(), k, poolsResource(), s.list())
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(list)
		}
		tab := newTable("NAMESPACE", "NAME", "TEMPLATE", "READY", "DESIRED", "UPDATE", "AGE")
		for _, p := range list {
			desired, update := int32(1), string(extensions.UpdateOnReplenish)
			if p.Spec.Replicas != nil {
				desired = *p.Spec.Replicas
			}
			if p.Spec.UpdateStrategy != nil && p.Spec.UpdateStrategy.Type != "" {
				update = string(p.Spec.UpdateStrategy.Type)
			}
			tab.add(p.Namespace, p.Name, p.Spec.SandboxTemplateRef.Name, fmt.Sprint(p.Status.ReadyReplicas),
				fmt.Sprint(desired), update, since(p.CreationTimestamp.Time))
		}
		tab.write(a.stdout)
		return nil
	}
	return cmd
}

func (a *app) poolShowCommand() *cobra.Command {
	var s scope
	cmd := &cobra.Command{Use: "show NAME", Short: "Show one warm pool", Args: exactly("NAME")}
	s.flags(cmd, false)
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.showObject(cmd.Context(), poolsResource(), s.namespace, args[0])
	}
	return cmd
}

func (a *app) poolScaleCommand() *cobra.Command {
	var s scope
	cmd := &cobra.Command{Use: "scale NAME COUNT", Short: "Set how many sandboxes a pool holds ready", Args: exactly("NAME", "COUNT")}
	s.flags(cmd, false)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		count, err := strconv.ParseUint(args[1], 10, 31)
		if err != nil {
			return &usageError{cmd, fmt.Errorf("COUNT: %q is not a whole number from 0 on", args[1])}
		}
		k, err := a.kube(cmd.Context())
		if err != nil {
			return err
		}
		body, err := json.Marshal(map[string]any{"spec": map[string]any{"replicas": count}})
		if err != nil {
			return fmt.Errorf("encode count: %w", err)
		}
		_, err = k.client.Resource(poolsResource()).Namespace(s.namespace).
			Patch(cmd.Context(), args[0], types.MergePatchType, body, metav1.PatchOptions{FieldManager: fieldManager}, "scale")
		if err != nil {
			return kubeError(err)
		}
		fmt.Fprintf(a.stdout, "%s scaled to %d\n", args[0], count)
		return nil
	}
	return cmd
}

// showObject prints one object as YAML or JSON.
func (a *app) showObject(ctx context.Context, r schema.GroupVersionResource, namespace, name string) error {
	k, err := a.kube(ctx)
	if err != nil {
		return err
	}
	u, err := k.client.Resource(r).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return kubeError(err)
	}
	u.SetManagedFields(nil)
	if a.json {
		return a.printJSON(u.Object)
	}
	b, err := yaml.Marshal(u.Object)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	_, err = a.stdout.Write(b)
	return err
}
