package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cluster"
)

// keyName is the object of the key that an installation makes.
const keyName = "installation"

func installCommand(t *target) *cobra.Command {
	var v valueFlags
	var r registry
	var opt cluster.InstallOptions
	var tenant, runtimeClass, templateImage string
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install Barchan on a cluster, or upgrade it",
		Long: "Install Barchan on a cluster, or bring an installation to this program's version and other values. What an earlier\n" +
			"installation was given stays, unless --reset-values. With --registry this program makes the images of itself and\n" +
			"pushes them there; else the values image and agentImage name them.\n\n" +
			"A first installation makes the template base for all tenants, and a key of the REST API.",
		Example: "  barchan cluster install --registry registry.example.com/team\n" +
			"  barchan cluster install --registry registry.example.com/team --runtime-class gvisor --set replica.replicas=3\n" +
			"  barchan cluster install -f images.yaml",
	}
	f := cmd.Flags()
	f.StringVar(&r.prefix, "registry", "", "registry, and the path of repositories in it, for this program's images")
	r.flags(cmd)
	v.add(cmd)
	f.BoolVar(&opt.Reset, "reset-values", false, "forget the values of earlier installations")
	f.BoolVar(&opt.TakeOver, "take-over", false, "stop agent-sandbox's controller, and own its definitions of kinds")
	f.DurationVar(&opt.Timeout, "timeout", 5*time.Minute, "for which to wait until the roles are ready")
	f.StringVar(&runtimeClass, "runtime-class", "", "RuntimeClass of sandboxes whose template names none, such as gvisor")
	f.StringVar(&templateImage, "template-image", "docker.io/library/python:3.13", "image of the template base, if there is none")
	f.StringVar(&tenant, "tenant", metav1.NamespaceDefault, "namespace that gets a key of the REST API, if it has none")
	t.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if opt.Timeout <= 0 {
			return app.Usage(cmd, fmt.Errorf("--timeout: %s is not positive", opt.Timeout))
		}
		var err error
		if opt.Values, err = v.read(cmd, t); err != nil {
			return err
		}
		if runtimeClass != "" {
			opt.Values = cluster.Merge(opt.Values, cluster.Values{"sandbox": cluster.Values{"runtimeClass": runtimeClass}})
		}
		return t.with(func(c *cluster.Cluster) error {
			if r.prefix != "" {
				images, err := r.push(cmd.Context(), t)
				if err != nil {
					return err
				}
				opt.Values = cluster.Merge(images, opt.Values)
			}
			if err := c.Install(cmd.Context(), opt); err != nil {
				return err
			}
			if err := makeTemplate(cmd, c, templateImage); err != nil {
				return err
			}
			key, err := t.makeKey(cmd.Context(), tenant)
			if err != nil {
				return err
			}
			return t.printInstalled(cmd.Context(), c, key)
		})
	}
	return cmd
}

// makeTemplate makes the template of all tenants if there is none at all, or its image is given.
func makeTemplate(cmd *cobra.Command, c *cluster.Cluster, image string) error {
	if image == "" {
		return nil
	}
	n, err := c.CountTemplates(cmd.Context())
	if err != nil {
		return err
	}
	if n > 0 && !cmd.Flags().Changed("template-image") {
		return nil
	}
	return c.ApplyTemplate(cmd.Context(), cluster.Template{Image: image, CPU: resource.MustParse("2"), Memory: resource.MustParse("512Mi")})
}

// makeKey makes the key of a tenant that has none, and returns it; else it returns "".
func (t *target) makeKey(ctx context.Context, tenant string) (string, error) {
	if tenant == "" {
		return "", nil
	}
	keys, err := app.List[barchan.APIKey](ctx, t.kube, app.KeysResource, tenant)
	if err != nil || len(keys) > 0 {
		return "", err
	}
	text, object := app.NewKey()
	object.Namespace, object.Name, object.Spec.Description = tenant, keyName, "made by barchan cluster install"
	err = app.CreateKey(ctx, t.kube, object)
	if errors.Is(err, errs.ErrConflict) { // another installer was faster
		return "", nil
	}
	return text, err
}

func (t *target) printInstalled(ctx context.Context, c *cluster.Cluster, key string) error {
	s, err := c.Status(ctx)
	if err != nil {
		return err
	}
	if t.JSON {
		return t.PrintJSON(struct {
			cluster.Status
			Key string `json:"key,omitempty"`
		}{s, key})
	}
	roles := make([]string, len(s.Roles))
	for i, r := range s.Roles {
		roles[i] = fmt.Sprintf("%s %s", strings.TrimPrefix(r.Name, "barchan-"), r.Text())
	}
	fmt.Fprintf(t.Stdout, "Barchan %s is up in namespace %s: %s\n\n", s.Version, s.Namespace, strings.Join(roles, ", "))
	fmt.Fprintf(t.Stdout, "Reach it from this machine:\n  kubectl port-forward -n %s service/barchan 7700:80\n", s.Namespace)
	if key != "" {
		fmt.Fprintf(t.Stdout, "and in another shell, with the key, which is not shown again:\n"+
			"  export E2B_API_KEY=%s E2B_API_URL=http://127.0.0.1:7700 E2B_SANDBOX_URL=http://127.0.0.1:7700\n", key)
	}
	return nil
}

func purgeCommand(t *target) *cobra.Command {
	var opt cluster.PurgeOptions
	var yes bool
	cmd := &cobra.Command{
		Use:   "purge",
		Short: "End all sandboxes, and remove Barchan from a cluster",
		Long: "End all sandboxes of a cluster, and remove Barchan with all its objects, also templates and keys. With --keep-objects\n" +
			"controllers and replicas are removed alone; a later installation goes on with what is there.",
	}
	f := cmd.Flags()
	f.BoolVar(&yes, "yes", false, "do it, although there are objects")
	f.BoolVar(&opt.KeepObjects, "keep-objects", false, "keep sandboxes and all other objects, and the definitions of their kinds")
	f.DurationVar(&opt.Timeout, "timeout", 2*time.Minute, "for which to wait for objects to end, before their finalizers are removed")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return t.with(func(c *cluster.Cluster) error {
			counts, err := c.Count(cmd.Context())
			if err != nil {
				return err
			}
			if len(counts) > 0 && !yes && !opt.KeepObjects {
				var list []string
				for _, resource := range slices.Sorted(maps.Keys(counts)) {
					list = append(list, fmt.Sprintf("%d %s", counts[resource], resource))
				}
				return fmt.Errorf("the cluster has %s, which would be deleted; --yes confirms it: %w", strings.Join(list, ", "), errs.ErrConflict)
			}
			if err := c.Purge(cmd.Context(), opt); err != nil {
				return err
			}
			fmt.Fprintln(t.Stdout, "Barchan is removed.")
			return nil
		})
	}
	return cmd
}
