package templates

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Handlers serves templates, their builds and tags.
type Handlers struct {
	request.Errors
	Manager *manager.Manager
}

// ListTemplates is GET /templates.
func (h *Handlers) ListTemplates(ctx context.Context, _ api.ListTemplatesRequestObject) (api.ListTemplatesResponseObject, error) {
	all, err := h.Manager.Templates.All(ctx, request.CallerOf(ctx).Namespace)
	if err != nil {
		return nil, err
	}
	return api.ListTemplates200JSONResponse(templateList(all)), nil
}

// ListTemplatesV2 is GET /v2/templates.
func (h *Handlers) ListTemplatesV2(ctx context.Context, r api.ListTemplatesV2RequestObject) (api.ListTemplatesV2ResponseObject, error) {
	limit, err := request.Limit(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	page, next, err := h.Manager.Templates.List(ctx, request.CallerOf(ctx).Namespace, limit, request.Deref(r.Params.NextToken))
	if err != nil {
		return nil, err
	}
	return templatePage{templateList(page), next}, nil
}

func templateList(list []templates.Template) []api.Template {
	out := make([]api.Template, len(list))
	for i, t := range list {
		out[i] = template(t)
	}
	return out
}

type templatePage struct {
	items []api.Template
	next  string
}

// VisitListTemplatesV2Response implements the generated interface.
func (p templatePage) VisitListTemplatesV2Response(w http.ResponseWriter) error {
	return request.WritePage(w, p.items, p.next)
}

// GetTemplate is GET /templates/{templateID}.
func (h *Handlers) GetTemplate(ctx context.Context, r api.GetTemplateRequestObject) (api.GetTemplateResponseObject, error) {
	t, err := h.Manager.Templates.Get(ctx, request.CallerOf(ctx).Namespace, r.TemplateID)
	if err != nil {
		return nil, err
	}
	out := templateWithBuilds(t)
	if h.Manager.Builds == nil || t.Build == "" || t.Namespace != request.CallerOf(ctx).Namespace {
		return api.GetTemplate200JSONResponse(out), nil
	}
	list, err := h.Manager.Builds.List(ctx, types.NamespacedName{Namespace: t.Namespace, Name: t.Object})
	if err != nil {
		return nil, err
	}
	if len(list) > 0 {
		out.Builds = templateBuilds(t, list)
	}
	return api.GetTemplate200JSONResponse(out), nil
}

// GetTemplateAlias is GET /templates/aliases/{alias}.
func (h *Handlers) GetTemplateAlias(ctx context.Context, r api.GetTemplateAliasRequestObject) (api.GetTemplateAliasResponseObject, error) {
	t, err := h.Manager.Templates.Get(ctx, request.CallerOf(ctx).Namespace, r.Alias)
	if err != nil {
		return nil, err
	}
	return api.GetTemplateAlias200JSONResponse{TemplateID: t.ID, Public: t.Public}, nil
}

// UpdateTemplate is PATCH /templates/{templateID}, of older clients.
func (h *Handlers) UpdateTemplate(ctx context.Context, r api.UpdateTemplateRequestObject) (api.UpdateTemplateResponseObject, error) {
	if _, err := h.updateTemplate(ctx, r.TemplateID, r.Body); err != nil {
		return nil, err
	}
	return api.UpdateTemplate200JSONResponse{}, nil
}

// UpdateTemplateV2 is PATCH /v2/templates/{templateID}.
func (h *Handlers) UpdateTemplateV2(ctx context.Context, r api.UpdateTemplateV2RequestObject) (api.UpdateTemplateV2ResponseObject, error) {
	t, err := h.updateTemplate(ctx, r.TemplateID, r.Body)
	if err != nil {
		return nil, err
	}
	return api.UpdateTemplateV2200JSONResponse{Names: templateNames(t)}, nil
}

// updateTemplate refuses what would change a template's visibility: a checkpoint is of one namespace, so no other team could start
// sandboxes from a built template.
func (h *Handlers) updateTemplate(ctx context.Context, id string, body *api.TemplateUpdate) (templates.Template, error) {
	t, err := h.Manager.Templates.Get(ctx, request.CallerOf(ctx).Namespace, id)
	if err != nil || body.Public == nil || *body.Public == t.Public {
		return t, err
	}
	if *body.Public {
		return t, apistatus.Refuse(errs.ErrForbidden, "public: templates of a team cannot be published on this server; an operator applies public ones in the namespace %s", templates.PublicNamespace)
	}
	return t, apistatus.Refuse(errs.ErrForbidden, "public: the operator decides that of the template %q", t.Name)
}

// DeleteTemplate is DELETE /templates/{templateID}, which deletes snapshots, and templates that builds made; on a cluster those that were applied.
func (h *Handlers) DeleteTemplate(ctx context.Context, r api.DeleteTemplateRequestObject) (api.DeleteTemplateResponseObject, error) {
	_, noTemplate := h.Manager.Templates.Get(ctx, request.CallerOf(ctx).Namespace, r.TemplateID)
	if noTemplate == nil {
		if err := h.Manager.DeleteTemplate(ctx, request.CallerOf(ctx).Namespace, r.TemplateID); err != nil {
			return nil, err
		}
		return api.DeleteTemplate204Response{}, nil
	}
	if !errors.Is(noTemplate, errs.ErrNotFound) {
		return nil, noTemplate
	}
	err := h.Manager.Snapshots.Delete(ctx, request.CallerOf(ctx).Namespace, r.TemplateID)
	if errors.Is(err, errs.ErrNotFound) && !strings.Contains(r.TemplateID, ":") { // a snapshot's ID has a tag
		err = noTemplate
	}
	if err != nil {
		return nil, err
	}
	return api.DeleteTemplate204Response{}, nil
}

func template(t templates.Template) api.Template {
	return api.Template{
		TemplateID: t.ID, BuildID: buildOf(t), BuildStatus: buildReady, BuildCount: 1,
		CPUCount: int32(t.Size.CPUs), MemoryMB: t.Size.MemoryMB, DiskSizeMB: t.Size.DiskMB,
		Public: t.Public, Aliases: t.Aliases, Names: templateNames(t), Tags: tagNames(t),
		CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt, EnvdVersion: envd.Version,
	}
}

func templateWithBuilds(t templates.Template) api.TemplateWithBuilds {
	return api.TemplateWithBuilds{
		TemplateID: t.ID, Public: t.Public, Aliases: t.Aliases, Names: templateNames(t), Tags: templateTags(t.Tags),
		CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt,
		Builds: []api.TemplateBuild{{
			BuildID: buildOf(t), Status: buildReady, EnvdVersion: envd.Version,
			CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt, FinishedAt: &t.UpdatedAt,
			CPUCount: int32(t.Size.CPUs), MemoryMB: t.Size.MemoryMB, DiskSizeMB: t.Size.DiskMB,
		}},
	}
}

func tagNames(t templates.Template) []string {
	names := make([]string, len(t.Tags))
	for i, tag := range t.Tags {
		names[i] = tag.Name
	}
	return names
}

func templateNames(t templates.Template) []string {
	names := make([]string, len(t.Aliases))
	for i, alias := range t.Aliases {
		names[i] = t.Namespace + "/" + alias
	}
	return names
}

// buildOf returns the ID of the build that last made a template; one that no build made counts as a build itself.
func buildOf(t templates.Template) string { return cmp.Or(t.Build, string(t.UID)) }

// buildReady is the state of every listed template.
const buildReady = string(builds.StateReady)
