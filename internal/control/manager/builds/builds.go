// Package builds requests, starts, shows and deletes what makes templates: TemplateBuild objects, the files that their
// steps copy, and their logs. It runs no step and waits for none: a controller does what the objects say.
package builds

import (
	"context"
	"fmt"
	"log/slog"

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
	"github.com/barchan-dev/barchan/internal/control/quota"
)

const (
	// maxCPUs and maxMemoryMB are more than any machine has.
	maxCPUs     = 4096
	maxMemoryMB = 1 << 26
)

// Cache reads builds and pools from memory.
type Cache interface {
	TemplateBuilds(ctx context.Context, namespace string) ([]barchan.TemplateBuild, error)
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
	// CurrentTemplates reads the templates of a namespace from the API server.
	CurrentTemplates(ctx context.Context, namespace string) ([]extensions.SandboxTemplate, error)
}

// Snapshots finds snapshots by "<name>:<tag>"; one that does not exist is an errs.ErrNotFound.
type Snapshots interface {
	Find(ctx context.Context, namespace, requested string) (*barchan.Checkpoint, error)
}

// Service has the builds of all tenants. Its fields are required except where a comment gives a default. It is safe for
// concurrent use.
type Service struct {
	Objects   sandboxes.Objects
	Cache     Cache
	Templates *templates.Catalog
	Snapshots Snapshots
	Files     *builds.Store
	Quota     *quota.Quotas
	Log       *slog.Logger
	// UploadKey signs the URLs of uploads.
	UploadKey []byte
	ECR       ECR
	// Gate refuses new builds while the server is degraded. Nil: never.
	Gate *health.Gate
	// Applied is of a cluster, where no builds are: Delete takes templates that were applied.
	Applied bool
}

// Request asks for a build.
type Request struct {
	Namespace string
	// Name of the template; a tag may follow it, which is one more of Tags.
	Name string
	// Tags get the result. Default: default.
	Tags []string
	// CPUs and MemoryMB (MiB) are limits of the template's sandboxes. 0: those of what the build starts from.
	CPUs, MemoryMB int
	// MinFreeMB (MiB) is what the server's disk must have free now.
	MinFreeMB int
}

// Requested is a build that waits for its steps.
type Requested struct {
	TemplateID, BuildID, Name string
	Tags                      []string
	Public                    bool
}

// Request makes a build's object, without steps.
func (s *Service) Request(ctx context.Context, req Request) (Requested, error) {
	name, tags, err := parseRequest(&req)
	if err != nil {
		return Requested{}, err
	}
	if err := s.Gate.Err(); err != nil {
		return Requested{}, err
	}
	if err := s.checkFree(req.MinFreeMB); err != nil {
		return Requested{}, err
	}
	all, err := s.Cache.CurrentTemplates(ctx, req.Namespace)
	if err != nil {
		return Requested{}, err
	}
	r := Requested{BuildID: string(uuid.NewUUID()), Name: name, Tags: tags}
	if known := templates.NameIn(all, name); known != "" {
		r.Name = known
	} else if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return Requested{}, apistatus.Refuse(errs.ErrInvalid, "name: %.80q must have from 1 to 253 lower-case letters, digits, dashes and dots, and begin and end with a letter or digit", name)
	}
	if err := s.checkTags(ctx, req.Namespace, r.Name, tags, all); err != nil {
		return Requested{}, err
	}
	r.TemplateID = pool.BuiltTemplateID(req.Namespace, r.Name)
	if have := tagsOf(all, r.Name); len(have) > 0 {
		r.TemplateID, r.Public = pool.TemplateID(&have[0]), have[0].Spec.Barchan != nil && have[0].Spec.Barchan.Public
	}
	b := newBuild(&req, &r)
	if err := s.Quota.Create(ctx, s.Objects, b); err != nil {
		return Requested{}, apistatus.From("create template build", err)
	}
	s.Log.InfoContext(ctx, "template build requested", telemetry.Namespace, b.Namespace, telemetry.Name, b.Name, telemetry.Template, r.Name, "tags", r.Tags)
	return r, nil
}

// newBuild returns the object of a build that was requested.
func newBuild(req *Request, r *Requested) *barchan.TemplateBuild {
	b := &barchan.TemplateBuild{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: req.Namespace, Name: r.BuildID,
			Labels:      map[string]string{agents.LabelCreatedBy: sandboxes.CreatedBy},
			Annotations: map[string]string{pool.AnnotationTemplateID: r.TemplateID, barchan.AnnotationCreatedAt: barchan.ExactNow()},
		},
		Spec: barchan.TemplateBuildSpec{TemplateName: r.Name, Tags: r.Tags},
	}
	if req.CPUs > 0 {
		b.Spec.CPU = resource.NewQuantity(int64(req.CPUs), resource.DecimalSI)
	}
	if req.MemoryMB > 0 {
		b.Spec.Memory = resource.NewQuantity(int64(req.MemoryMB)<<20, resource.BinarySI)
	}
	return b
}

// parseRequest checks the fields of a request, and returns the template's name and the tags.
func parseRequest(req *Request) (name string, tags []string, err error) {
	name, tag, tagged, err := splitName("name", req.Namespace, req.Name)
	if err != nil {
		return "", nil, err
	}
	tags = req.Tags
	if tagged {
		tags = append([]string{tag}, tags...)
	}
	if tags, err = cleanTags(tags); err != nil {
		return "", nil, err
	}
	if len(tags) == 0 {
		tags = []string{barchan.DefaultTag}
	}
	switch {
	case req.CPUs < 0 || req.CPUs > maxCPUs:
		return "", nil, apistatus.Refuse(errs.ErrInvalid, "cpuCount: must be from 1 to %d", maxCPUs)
	case req.MemoryMB < 0 || req.MemoryMB > maxMemoryMB:
		return "", nil, apistatus.Refuse(errs.ErrInvalid, "memoryMB: must be from 1 to %d", maxMemoryMB)
	case req.MinFreeMB < 0:
		return "", nil, apistatus.Refuse(errs.ErrInvalid, "minFreeDiskMb: must be 0 or more")
	}
	return name, tags, nil
}

// checkFree refuses a build for whose sandboxes the server's disk, which they share without limits of their own, has too little free.
func (s *Service) checkFree(wantMB int) error {
	if wantMB == 0 {
		return nil
	}
	free, err := s.Files.Free()
	if err != nil {
		return err
	}
	if have := free >> 20; int64(wantMB) > have {
		return apistatus.Refuse(errs.ErrInvalid, "minFreeDiskMb: the server's disk, which all sandboxes share, has %d MiB free", have)
	}
	return nil
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

// Cancel ends a build that has not ended, by deleting it. The template stays as it was.
func (s *Service) Cancel(ctx context.Context, namespace, templateID, buildID string) error {
	b, err := s.find(ctx, namespace, templateID, buildID)
	if err != nil {
		return err
	}
	if b.Ended() {
		return apistatus.Refuse(errs.ErrConflict, "build '%s' has ended; only one that has not can be canceled", buildID)
	}
	err = s.Objects.Delete(ctx, b, client.Preconditions{UID: &b.UID})
	if client.IgnoreNotFound(err) != nil {
		return apistatus.From("cancel template build "+buildID, err)
	}
	s.Log.InfoContext(ctx, "template build canceled", telemetry.Namespace, b.Namespace, telemetry.Name, b.Name, telemetry.Template, b.Spec.TemplateName)
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
