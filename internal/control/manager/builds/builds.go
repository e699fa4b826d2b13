// Package builds requests, starts, shows and deletes what makes templates: TemplateBuild objects, the files that their
// steps copy, and their logs. It runs no step and waits for none: a controller does what the objects say.
package builds

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
)

const (
	// maxOpen bounds the builds of a tenant that have not ended.
	maxOpen = 100
	// maxCPUs and maxMemoryMB are more than any machine has.
	maxCPUs     = 4096
	maxMemoryMB = 1 << 26
)

// Cache reads builds and pools from memory.
type Cache interface {
	TemplateBuilds(ctx context.Context, namespace string) ([]barchan.TemplateBuild, error)
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
}

// Service has the builds of all tenants. Its fields are required except where a comment gives a default. It is safe for
// concurrent use.
type Service struct {
	Objects   sandboxes.Objects
	Cache     Cache
	Templates *templates.Catalog
	Files     *builds.Store
	Log       *slog.Logger
	// UploadKey signs the URLs of uploads.
	UploadKey []byte
	// Gate refuses new builds while the server is degraded. Nil: never.
	Gate *health.Gate
}

// Request asks for a build.
type Request struct {
	Namespace string
	// Name of the template, alone or followed by the tag "default".
	Name string
	// Tags may have "default" alone.
	Tags []string
	// CPUs and MemoryMB (MiB) are limits of the template's sandboxes. 0: those of what the build starts from.
	CPUs, MemoryMB int
}

// Requested is a build that waits for its steps.
type Requested struct {
	TemplateID, BuildID, Name, Tag string
	Public                         bool
}

// Request makes a build's object, without steps.
func (s *Service) Request(ctx context.Context, req Request) (Requested, error) {
	name, err := parseName(&req)
	if err != nil {
		return Requested{}, err
	}
	if err := s.Gate.Err(); err != nil {
		return Requested{}, err
	}
	if err := s.checkOpen(ctx, req.Namespace); err != nil {
		return Requested{}, err
	}
	r := Requested{TemplateID: pool.BuiltTemplateID(req.Namespace, name), BuildID: string(uuid.NewUUID()), Name: name, Tag: barchan.DefaultTag}
	switch t, err := s.own(ctx, req.Namespace, name); {
	case err == nil && t.Labels[barchan.LabelBuild] == "":
		return Requested{}, apistatus.Refuse(errs.ErrConflict, "name: the template %q exists and was not made by a build; choose another name", t.Name)
	case err == nil:
		r.TemplateID, r.Name, r.Public = pool.TemplateID(t), t.Name, t.Spec.Barchan != nil && t.Spec.Barchan.Public
	case !errors.Is(err, errs.ErrNotFound):
		return Requested{}, err
	case len(validation.IsDNS1123Subdomain(name)) > 0:
		return Requested{}, apistatus.Refuse(errs.ErrInvalid, "name: %.80q must have from 1 to 253 lower-case letters, digits, dashes and dots, and begin and end with a letter or digit", name)
	}
	b := &barchan.TemplateBuild{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: req.Namespace, Name: r.BuildID,
			Labels:      map[string]string{agents.LabelCreatedBy: sandboxes.CreatedBy},
			Annotations: map[string]string{pool.AnnotationTemplateID: r.TemplateID, barchan.AnnotationCreatedAt: barchan.ExactNow()},
		},
		Spec: barchan.TemplateBuildSpec{TemplateName: r.Name},
	}
	if req.CPUs > 0 {
		b.Spec.CPU = resource.NewQuantity(int64(req.CPUs), resource.DecimalSI)
	}
	if req.MemoryMB > 0 {
		b.Spec.Memory = resource.NewQuantity(int64(req.MemoryMB)<<20, resource.BinarySI)
	}
	if err := s.Objects.Create(ctx, b); err != nil {
		return Requested{}, apistatus.From("create template build", err)
	}
	s.Log.InfoContext(ctx, "template build requested", telemetry.Namespace, b.Namespace, telemetry.Name, b.Name, telemetry.Template, r.Name)
	return r, nil
}

// parseName checks the fields of a request, and returns the template's name.
func parseName(req *Request) (string, error) {
	name, tag, tagged := strings.Cut(req.Name, ":")
	if team, rest, qualified := strings.Cut(name, "/"); qualified {
		if team != req.Namespace {
			return "", apistatus.Refuse(errs.ErrInvalid, "name: %.80q is not your team; leave it out, or write %.80q", team, req.Namespace+"/"+rest)
		}
		name = rest
	}
	if tags := req.Tags; tagged || len(tags) > 0 {
		if tagged {
			tags = append([]string{tag}, tags...)
		}
		for _, t := range tags {
			if t != barchan.DefaultTag {
				return "", apistatus.Refuse(errs.ErrInvalid, "tags: tags are not supported yet, %.80q neither; leave them out", t)
			}
		}
	}
	switch {
	case name == "":
		return "", apistatus.Refuse(errs.ErrInvalid, "name: must name a template")
	case req.CPUs < 0 || req.CPUs > maxCPUs:
		return "", apistatus.Refuse(errs.ErrInvalid, "cpuCount: must be from 1 to %d", maxCPUs)
	case req.MemoryMB < 0 || req.MemoryMB > maxMemoryMB:
		return "", apistatus.Refuse(errs.ErrInvalid, "memoryMB: must be from 1 to %d", maxMemoryMB)
	}
	return name, nil
}

// own finds a tenant's own template, by name, alias or ID.
func (s *Service) own(ctx context.Context, namespace, name string) (*extensions.SandboxTemplate, error) {
	t, err := s.Templates.Resolve(ctx, namespace, namespace+"/"+name)
	if errors.Is(err, errs.ErrNotFound) {
		return s.Templates.ResolveUncached(ctx, namespace, namespace+"/"+name)
	}
	return t, err
}

// checkOpen refuses one build more than may be open.
func (s *Service) checkOpen(ctx context.Context, namespace string) error {
	all, err := s.Cache.TemplateBuilds(ctx, namespace)
	if err != nil {
		return fmt.Errorf("list template builds: %w", err)
	}
	open := 0
	for i := range all {
		if !ended(&all[i]) {
			open++
		}
	}
	if open >= maxOpen {
		return apistatus.Refuse(errs.ErrExhausted, "at most %d template builds may be open; wait for some to end, or delete them", maxOpen)
	}
	return nil
}

func ended(b *barchan.TemplateBuild) bool {
	return b.Status.Phase == barchan.BuildReady || b.Status.Phase == barchan.BuildFailed
}

// find reads a build of a template from the API server, which has what was written just before.
func (s *Service) find(ctx context.Context, namespace, templateID, buildID string) (*barchan.TemplateBuild, error) {
	unknown := apistatus.Refuse(errs.ErrNotFound, "build '%.80s' of template '%.80s' not found", buildID, templateID)
	if len(validation.IsDNS1123Subdomain(buildID)) > 0 {
		return nil, unknown
	}
	b := &barchan.TemplateBuild{}
	err := s.Objects.Get(ctx, client.ObjectKey{Namespace: namespace, Name: buildID}, b)
	if apierrors.IsNotFound(err) {
		return nil, unknown
	}
	if err != nil {
		return nil, apistatus.From("read template build "+buildID, err)
	}
	if templateID != templateIDOf(b) && templateID != b.Spec.TemplateName || b.DeletionTimestamp != nil {
		return nil, unknown
	}
	return b, nil
}

// templateIDOf returns the template's ID as the client of a build knows it.
func templateIDOf(b *barchan.TemplateBuild) string {
	for _, id := range []string{b.Annotations[pool.AnnotationTemplateID], b.Status.TemplateID} {
		if id != "" {
			return id
		}
	}
	return pool.BuiltTemplateID(b.Namespace, b.Spec.TemplateName)
}

// Delete deletes a tenant's own template that a build made, and cancels builds of it. Its sandboxes stay.
func (s *Service) Delete(ctx context.Context, namespace, name string) error {
	t, err := s.Templates.Resolve(ctx, namespace, name)
	if err != nil {
		return err
	}
	if t.Namespace != namespace || t.Labels[barchan.LabelBuild] == "" {
		return apistatus.Refuse(errs.ErrForbidden, "the template %q was not made by a build of yours, so its operator deletes it; a snapshot of the same name is deleted by its ID, <name>:<tag>", pool.TemplateName(t))
	}
	key := client.ObjectKeyFromObject(t)
	users, err := s.Cache.PoolsOf(ctx, "", key)
	if err != nil {
		return fmt.Errorf("list warm pools: %w", err)
	}
	if len(users) > 0 {
		return apistatus.Refuse(errs.ErrConflict, "the template %q is used by the warm pool %q; delete that first", pool.TemplateName(t), users[0].Name)
	}
	all, err := s.buildsOf(ctx, key)
	if err != nil {
		return err
	}
	for i := range all {
		if !ended(&all[i]) {
			if err := s.Objects.Delete(ctx, &all[i], client.Preconditions{UID: &all[i].UID}); client.IgnoreNotFound(err) != nil {
				return apistatus.From("cancel template build "+all[i].Name, err)
			}
		}
	}
	err = s.Objects.Delete(ctx, t, client.Preconditions{UID: &t.UID})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return templates.NotFound(name)
	}
	if err != nil {
		return apistatus.From("delete template "+t.Name, err)
	}
	s.Log.InfoContext(ctx, "template deleted", telemetry.Namespace, t.Namespace, telemetry.Name, t.Name)
	return nil
}

// buildsOf returns the builds of a template, in no order.
func (s *Service) buildsOf(ctx context.Context, template types.NamespacedName) (own []barchan.TemplateBuild, err error) {
	all, err := s.Cache.TemplateBuilds(ctx, template.Namespace)
	if err != nil {
		return nil, fmt.Errorf("list template builds: %w", err)
	}
	for i := range all {
		if all[i].Spec.TemplateName == template.Name && all[i].DeletionTimestamp == nil {
			own = append(own, all[i])
		}
	}
	return own, nil
}
