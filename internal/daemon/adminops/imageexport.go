package adminops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/layers"
	"github.com/barchan-dev/barchan/internal/node/transfer"
)

// Export writes an image as a tar: that of a template of a namespace, with its settings, or else the local one of that name.
func (s imageStore) Export(ctx context.Context, req adminclient.ImageExport, w io.Writer) error {
	p, err := s.own(ctx)
	if err != nil {
		return err
	}
	if len(validation.IsDNS1123Subdomain(req.Source)) > 0 { // no object has such a name
		return exportLocal(ctx, p, req, w)
	}
	t := &extensions.SandboxTemplate{}
	err = p.Cache.Live().Get(ctx, client.ObjectKey{Namespace: req.Namespace, Name: req.Source}, t)
	switch {
	case err == nil:
		x, err := exportOf(ctx, p, t)
		if err != nil {
			return err
		}
		x.Name = cmp.Or(req.Name, x.Name)
		return p.Machine.Node.ExportImage(ctx, x, w)
	case !apierrors.IsNotFound(err):
		return fmt.Errorf("read template %s/%s: %w", req.Namespace, req.Source, err)
	}
	return exportLocal(ctx, p, req, w)
}

func exportLocal(ctx context.Context, p Parts, req adminclient.ImageExport, w io.Writer) error {
	err := p.Machine.Node.ExportImage(ctx, transfer.ImageExport{Ref: req.Source, Name: cmp.Or(req.Name, req.Source)}, w)
	if errors.Is(err, errs.ErrNotFound) {
		return errs.Public(errs.ErrNotFound, fmt.Sprintf("%s: namespace %s has no such template, and this machine no such image", req.Source, req.Namespace))
	}
	return err
}

// exportOf returns a template as an image.
func exportOf(ctx context.Context, p Parts, t *extensions.SandboxTemplate) (x transfer.ImageExport, err error) {
	name := t.Namespace + "/" + t.Name
	spec := &t.Spec.PodTemplate.Spec
	if len(spec.Containers) != 1 {
		return x, fmt.Errorf("template %s has %d containers, an image is of one: %w", name, len(spec.Containers), errs.ErrInvalid)
	}
	x = transfer.ImageExport{Ref: spec.Containers[0].Image, Name: "barchan.local/" + t.Name + ":latest"}
	build, err := buildOf(ctx, p, t)
	if err != nil {
		return x, err
	}
	user := ""
	if b := t.Spec.Barchan; b != nil && b.Sandbox != nil {
		user = b.Sandbox.DefaultUser
		if from := b.Sandbox.Restore; from != nil {
			c := &barchan.Checkpoint{}
			if err := p.Cache.Live().Get(ctx, client.ObjectKey{Namespace: t.Namespace, Name: from.CheckpointName}, c); err != nil {
				return x, fmt.Errorf("read checkpoint %s of template %s: %w", from.CheckpointName, name, err)
			}
			x.Checkpoint = &sandbox.CheckpointRef{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
			if s := c.Status.Source; s != nil && s.Secrets {
				return x, fmt.Errorf("template %s starts from checkpoint %s, which holds what the claim of its sandbox brought: %w", name, c.Name, errs.ErrForbidden)
			}
		}
	}
	start := ""
	if build != nil {
		x.WithoutMemory, x.History, start = true, layers.History(&build.Spec), build.Spec.StartCommand
	}
	x.Change = settingsOf(&spec.Containers[0], user, start)
	return x, nil
}

// buildOf returns the build that made a template; nil if none did, or it is gone.
func buildOf(ctx context.Context, p Parts, t *extensions.SandboxTemplate) (*barchan.TemplateBuild, error) {
	name := t.Labels[barchan.LabelBuild]
	if name == "" {
		return nil, nil
	}
	b := &barchan.TemplateBuild{}
	err := p.Cache.Live().Get(ctx, client.ObjectKey{Namespace: t.Namespace, Name: name}, b)
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("template %s/%s: its build %s was deleted, which has its start command; build it again: %w", t.Namespace, t.Name, name, errs.ErrNotFound)
	} else if err != nil {
		return nil, fmt.Errorf("read build %s: %w", name, err)
	}
	return b, nil
}

// settingsOf returns what writes a container's settings into an image: variables, directory, user and program.
func settingsOf(c *corev1.Container, user, start string) func(*ocispec.Image) {
	return func(i *ocispec.Image) {
		for _, v := range c.Env {
			if v.ValueFrom == nil {
				i.Config.Env = setEnv(i.Config.Env, v.Name, strings.ReplaceAll(v.Value, "$$", "$"))
			}
		}
		i.Config.WorkingDir, i.Config.User = cmp.Or(c.WorkingDir, i.Config.WorkingDir), cmp.Or(user, i.Config.User)
		if start != "" {
			i.Config.Entrypoint, i.Config.Cmd = nil, layers.StartArguments(start)
		}
	}
}

func setEnv(all []string, name, value string) []string {
	for i := range all {
		if has, _, _ := strings.Cut(all[i], "="); has == name {
			all[i] = name + "=" + value
			return all
		}
	}
	return append(all, name+"="+value)
}
