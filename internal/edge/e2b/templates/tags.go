package templates

import (
	"cmp"
	"context"

	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// AssignTemplateTags is POST /templates/tags.
func (h *Handlers) AssignTemplateTags(ctx context.Context, r api.AssignTemplateTagsRequestObject) (api.AssignTemplateTagsResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	build, tags, err := h.Manager.Builds.AssignTags(ctx, request.CallerOf(ctx).Namespace, r.Body.Target, r.Body.Tags)
	if err != nil {
		return nil, err
	}
	return api.AssignTemplateTags201JSONResponse{BuildID: build, Tags: tags}, nil
}

// DeleteTemplateTags is DELETE /templates/tags.
func (h *Handlers) DeleteTemplateTags(ctx context.Context, r api.DeleteTemplateTagsRequestObject) (api.DeleteTemplateTagsResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	if err := h.Manager.Builds.RemoveTags(ctx, request.CallerOf(ctx).Namespace, r.Body.Name, r.Body.Tags); err != nil {
		return nil, err
	}
	return api.DeleteTemplateTags204Response{}, nil
}

// ListTemplateTags is GET /templates/{templateID}/tags.
func (h *Handlers) ListTemplateTags(ctx context.Context, r api.ListTemplateTagsRequestObject) (api.ListTemplateTagsResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	tags, err := h.Manager.Builds.Tags(ctx, request.CallerOf(ctx).Namespace, r.TemplateID)
	if err != nil {
		return nil, err
	}
	return api.ListTemplateTags200JSONResponse(templateTags(tags)), nil
}

func templateTags(tags []templates.Tag) []api.TemplateTag {
	out := make([]api.TemplateTag, len(tags))
	for i, t := range tags {
		out[i] = api.TemplateTag{Tag: t.Name, BuildID: cmp.Or(t.Build, string(t.UID)), CreatedAt: t.AssignedAt}
	}
	return out
}
