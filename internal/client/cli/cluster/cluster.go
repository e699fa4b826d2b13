// Package cluster has `barchan cluster`, the commands for administrators of Kubernetes clusters. The work is in package client/cluster.
package cluster

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"helm.sh/helm/v4/pkg/strvals"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/client/cluster"
)

// Command returns `barchan cluster`.
func Command(a *app.App) *cobra.Command {
	t := &target{App: a}
	cmd := app.NounCommand("cluster", "Barchan on a Kubernetes cluster",
		installCommand(t), statusCommand(t), doctorCommand(t), purgeCommand(t), imagesCommand(t), manifestsCommand(t), valuesCommand(t), chartCommand(t))
	cmd.Long = "Install Barchan on a Kubernetes cluster, where every sandbox is a Pod. The cluster is that of --kubeconfig,\n" +
		"of $KUBECONFIG, or of ~/.kube/config."
	f := cmd.PersistentFlags()
	f.StringVar(&t.context, "context", "", "context of the kubeconfig (default its current one)")
	f.StringVar(&t.namespace, "system-namespace", cluster.DefaultNamespace, "namespace of controllers and replicas")
	return cmd
}

// target is the cluster that commands work on.
type target struct {
	*app.App
	context, namespace string

	kube *app.Kube // once it is open
}

// open returns the cluster, and what ends its progress.
func (t *target) open() (*cluster.Cluster, func(), error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = t.First(t.Kubeconfig)
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: t.context}).ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, nil, fmt.Errorf("no cluster: --kubeconfig or $KUBECONFIG names its kubeconfig: %w", errs.ErrInvalid)
	} else if err != nil {
		return nil, nil, fmt.Errorf("kubeconfig: %w: %w", err, errs.ErrInvalid)
	}
	cfg.UserAgent = "barchan/" + t.Version().Version
	cfg.QPS, cfg.Burst = -1, 0 // the server has its own limits
	t.kube = &app.Kube{Config: cfg}
	if t.kube.Client, err = dynamic.NewForConfig(cfg); err != nil {
		return nil, nil, fmt.Errorf("kubeconfig: %w: %w", err, errs.ErrInvalid)
	}
	progress := terminal.NewProgress(t.Stderr)
	c, err := cluster.New(cluster.Config{REST: cfg, Dynamic: t.kube.Client, Namespace: t.namespace, Version: t.Version().Version, Progress: progress.Event})
	return c, progress.End, err
}

func (t *target) with(work func(c *cluster.Cluster) error) error {
	c, end, err := t.open()
	if err != nil {
		return err
	}
	defer end()
	return work(c)
}

func statusCommand(t *target) *cobra.Command {
	return t.JSONFlag(&cobra.Command{
		Use:   "status",
		Short: "Show what is installed, and whether it runs",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.with(func(c *cluster.Cluster) error {
				s, err := c.Status(cmd.Context())
				if err != nil {
					return err
				}
				return t.printStatus(s)
			})
		},
	})
}

func (t *target) printStatus(s cluster.Status) error {
	if t.JSON {
		return t.PrintJSON(s)
	}
	const width = 18
	version := s.Version
	if s.By != "" {
		version += ", by " + s.By
	}
	t.Field(width, "version", version)
	t.Field(width, "kubernetes", s.Kubernetes)
	t.Field(width, "namespace", s.Namespace)
	for _, r := range s.Roles {
		t.Field(width, strings.TrimPrefix(r.Name, "barchan-"), r.Text())
	}
	t.Field(width, "leader", terminal.Dash(s.Leader))
	for _, resource := range slices.Sorted(maps.Keys(s.Objects)) {
		t.Field(width, resource, fmt.Sprint(s.Objects[resource]))
	}
	return nil
}

func doctorCommand(t *target) *cobra.Command {
	return t.JSONFlag(&cobra.Command{
		Use:   "doctor",
		Short: "Check a cluster, and the installation if there is one",
		Long: "Check whether a cluster can run Barchan, and the installation if there is one. The exit code is 1 if something\n" +
			"must be done.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return t.with(func(c *cluster.Cluster) error { return t.PrintChecks(c.Doctor(cmd.Context())) })
		},
	})
}

// valueFlags are the values of the chart, as Helm's flags give them.
type valueFlags struct {
	files, set []string
}

func (v *valueFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringArrayVarP(&v.files, "values", "f", nil, "YAML `file` of values; `barchan cluster values` prints them all")
	cmd.Flags().StringArrayVar(&v.set, "set", nil, "a value, such as `replica.replicas=3`; it wins over files")
}

func (v *valueFlags) read(cmd *cobra.Command, t *target) (cluster.Values, error) {
	values := cluster.Values{}
	for _, file := range v.files {
		text, err := t.readFile(cmd.Context(), file)
		if err != nil {
			return nil, fmt.Errorf("--values: %w", err)
		}
		more := cluster.Values{}
		if err := yaml.Unmarshal(text, &more); err != nil {
			return nil, fmt.Errorf("--values %s: %w: %w", file, err, errs.ErrInvalid)
		}
		values = cluster.Merge(values, more)
	}
	for _, s := range v.set {
		if err := strvals.ParseInto(s, values); err != nil {
			return nil, app.Usage(cmd, fmt.Errorf("--set %s: %w", s, err))
		}
	}
	return values, nil
}

func (t *target) readFile(ctx context.Context, name string) ([]byte, error) {
	in, err := t.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }()
	return io.ReadAll(in)
}

func manifestsCommand(t *target) *cobra.Command {
	var v valueFlags
	cmd := &cobra.Command{
		Use:   "manifests",
		Short: "Print the objects that an installation has",
		Long: "Print the objects that an installation has, as YAML for kubectl or a repository. They do not have the Secret\n" +
			"barchan-token with 32 random bytes under the key token-secret, which must be there.",
		Example: "  barchan cluster images registry.example.com/team >images.yaml\n  barchan cluster manifests -f images.yaml >barchan.yaml",
	}
	v.add(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		values, err := v.read(cmd, t)
		if err != nil {
			return err
		}
		if _, given := values["tokenSecret"]; !given {
			values["tokenSecret"] = cluster.TokenSecret
		}
		objects, err := cluster.Render(cluster.Release{Namespace: t.namespace, Version: t.Version().Version}, values)
		if err != nil {
			return err
		}
		for _, u := range append([]*unstructured.Unstructured{cluster.Namespace(t.namespace)}, objects...) {
			text, err := yaml.Marshal(u.Object)
			if err == nil {
				_, err = fmt.Fprintf(t.Stdout, "---\n%s", text)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	return cmd
}

func valuesCommand(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "values",
		Short: "Print all values of an installation, with their defaults",
		RunE: func(*cobra.Command, []string) error {
			text, err := cluster.DefaultValues()
			if err == nil {
				_, err = t.Stdout.Write(text)
			}
			return err
		},
	}
}

func chartCommand(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "chart DIRECTORY",
		Short: "Write the Helm chart as an archive",
		Long:  "Write the Helm chart as an archive into a directory, and print its name.",
		RunE: func(_ *cobra.Command, args []string) error {
			file, err := cluster.WriteChart(t.Version().Version, args[0])
			if err == nil {
				fmt.Fprintln(t.Stdout, file)
			}
			return err
		},
	}
}
