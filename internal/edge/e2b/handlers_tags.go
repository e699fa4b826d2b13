package e2b

import (
	"cmp"
	"context"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
)

// AssignTemplateTags is POST /templates/tags.
func (h *handlers) AssignTemplateTags(ctx context.Context, r AssignTemplateTagsRequestObject) (AssignTemplateTagsResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	build, tags, err := h.manager.Builds.AssignTags(ctx, callerOf(ctx).Namespace, r.Body.Target, r.Body.Tags)
	if err != nil {
		return nil, err
	}
	return AssignTemplateTags201JSONResponse{BuildID: build, Tags: tags}, nil
}

// DeleteTemplateTags is DELETE /templates/tags.
func (h *handlers) DeleteTemplateTags(ctx context.Context, r DeleteTemplateTagsRequestObject) (DeleteTemplateTagsResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	if err := h.manager.Builds.RemoveTags(ctx, callerOf(ctx).Namespace, r.Body.Name, r.Body.Tags); err != nil {
		return nil, err
	}
	return DeleteTemplateTags204Response{}, nil
}

// ListTemplateTags is GET /templates/{templateID}/tags.
func (h *handlers) ListTemplateTags(ctx context.Context, r ListTemplateTagsRequestObject) (ListTemplateTagsResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	tags, err := h.manager.Builds.Tags(ctx, callerOf(ctx).Namespace, r.TemplateID)
	if err != nil {
		return nil, err
	}
	return ListTemplateTags200JSONResponse(templateTags(tags)), nil
}

func templateTags(tags []templates.Tag) []TemplateTag {
	out := make([]TemplateTag, len(tags))
	for i, t := range tags {
		out[i] = TemplateTag{Tag: t.Name, BuildID: cmp.Or(t.Build, string(t.UID)), CreatedAt: t.AssignedAt}
	}
	return out
}

// CancelTemplateBuild is DELETE /templates/{templateID}/builds/{buildID}.
func (h *handlers) CancelTemplateBuild(ctx context.Context, r CancelTemplateBuildRequestObject) (CancelTemplateBuildResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	if err := h.manager.Builds.Cancel(ctx, callerOf(ctx).Namespace, r.TemplateID, r.BuildID); err != nil {
		return nil, err
	}
	return CancelTemplateBuild204Response{}, nil
}

// UpdateTemplate is PATCH /templates/{templateID}, of older clients.
func (h *handlers) UpdateTemplate(ctx context.Context, r UpdateTemplateRequestObject) (UpdateTemplateResponseObject, error) {
	if _, err := h.updateTemplate(ctx, r.TemplateID, r.Body); err != nil {
		return nil, err
	}
	return UpdateTemplate200JSONResponse{}, nil
}

// UpdateTemplateV2 is PATCH /v2/templates/{templateID}.
func (h *handlers) UpdateTemplateV2(ctx context.Context, r UpdateTemplateV2RequestObject) (UpdateTemplateV2ResponseObject, error) {
	t, err := h.updateTemplate(ctx, r.TemplateID, r.Body)
	if err != nil {
		return nil, err
	}
	return UpdateTemplateV2200JSONResponse{Names: templateNames(t)}, nil
}

// updateTemplate refuses what would change a template's visibility: a checkpoint is of one namespace, so no other team could start
// sandboxes from a built template.
func (h *handlers) updateTemplate(ctx context.Context, id string, body *TemplateUpdate) (templates.Template, error) {
	t, err := h.manager.Templates.Get(ctx, callerOf(ctx).Namespace, id)
	if err != nil || body.Public == nil || *body.Public == t.Public {
		return t, err
	}
	if *body.Public {
		return t, apistatus.Refuse(errs.ErrForbidden, "public: templates of a team cannot be published on this server; an operator applies public ones in the namespace %s", templates.PublicNamespace)
	}
	return t, apistatus.Refuse(errs.ErrForbidden, "public: the operator decides that of the template %q", t.Name)
}
