package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cluster/images"
)

// programs are those that images have, with the value of the chart that names the image.
var programs = []struct{ name, value, title string }{
	{"barchan", "image", "Barchan: controllers and replicas"},
	{"barchan-agent", "agentImage", "Barchan: the agent of sandboxes"},
}

// registry is where images are pushed to.
type registry struct {
	prefix, from, tag string
	access            portable.Access
}

func (r *registry) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&r.from, "from", "", "`directory` that 'make images' filled (default: this program and its agent)")
	cmd.Flags().StringVar(&r.tag, "tag", "", "tag of the images (default this program's version)")
	app.RegistryFlags(cmd, &r.access)
}

func imagesCommand(t *target) *cobra.Command {
	var r registry
	cmd := &cobra.Command{
		Use:   "images REGISTRY",
		Short: "Make the images of an installation, and push them to a registry",
		Long: "Make the images barchan and barchan-agent of this program and its agent, and push them to a registry. No\n" +
			"container runtime is needed. The names of the images by digest are printed as values of an installation.",
		Example: "  barchan cluster images registry.example.com/team",
	}
	r.flags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		r.prefix = args[0]
		values, err := r.push(cmd.Context(), t)
		if err != nil {
			return err
		}
		if t.JSON {
			return t.PrintJSON(values)
		}
		for _, p := range programs {
			fmt.Fprintf(t.Stdout, "%s: %s\n", p.value, values[p.value])
		}
		return nil
	}
	return t.JSONFlag(cmd)
}

// push returns the images as values of the chart.
func (r *registry) push(ctx context.Context, t *target) (map[string]any, error) {
	version := t.Version().Version
	tag := r.tag
	if tag == "" {
		tag = regexp.MustCompile(`[^A-Za-z0-9._-]`).ReplaceAllString(version, "-")
	}
	values := map[string]any{}
	for _, p := range programs {
		files, err := r.files(p.name)
		if err != nil {
			return nil, err
		}
		to, err := portable.ParseImage(path.Join(r.prefix, p.name)+":"+tag, r.access)
		if err != nil {
			return nil, fmt.Errorf("REGISTRY: %w", err)
		}
		done := t.NotifyIfSlow("push " + to.String())
		index, err := images.Build(p.title, version, files...)
		if err == nil {
			values[p.value], err = portable.PushImages(ctx, index, to)
		}
		done()
		if err != nil {
			return nil, err
		}
	}
	return values, nil
}

// files returns the programs of a name, of each architecture.
func (r *registry) files(name string) ([]string, error) {
	if r.from != "" {
		files, err := filepath.Glob(filepath.Join(r.from, "*", name))
		if err == nil && len(files) == 0 {
			err = fmt.Errorf("--from: %s has no %s in directories of architectures, such as amd64: %w", r.from, name, errs.ErrInvalid)
		}
		return files, err
	}
	program, err := os.Executable()
	if err == nil {
		program, err = filepath.EvalSymlinks(program)
	}
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	if name == programs[0].name {
		return []string{program}, nil
	}
	file := filepath.Join(filepath.Dir(program), name)
	if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s is missing beside this program; --from names a directory that has it: %w", file, errs.ErrNotFound)
	}
	return []string{file}, nil
}
