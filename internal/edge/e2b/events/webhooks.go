package events

import (
	"context"

	"github.com/barchan-dev/barchan/internal/control/webhooks"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

func (h *Handlers) webhooks() (*webhooks.Service, error) {
	if h.Manager.Webhooks == nil {
		return nil, request.Unavailable("webhooks: not available on a Kubernetes cluster, where no role of Barchan reads Secrets; read /events/sandboxes, or watch the Sandboxes by the Kubernetes API")
	}
	return h.Manager.Webhooks, nil
}

// ListWebhooks is GET /events/webhooks.
func (h *Handlers) ListWebhooks(ctx context.Context, _ api.ListWebhooksRequestObject) (api.ListWebhooksResponseObject, error) {
	s, err := h.webhooks()
	if err != nil {
		return nil, err
	}
	all, err := s.List(ctx, request.CallerOf(ctx).Namespace)
	if err != nil {
		return nil, err
	}
	out := make(api.ListWebhooks200JSONResponse, len(all))
	for i := range all {
		if out[i], err = h.webhook(&all[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// CreateWebhook is POST /events/webhooks.
func (h *Handlers) CreateWebhook(ctx context.Context, r api.CreateWebhookRequestObject) (api.CreateWebhookResponseObject, error) {
	s, err := h.webhooks()
	if err != nil {
		return nil, err
	}
	b := r.Body
	w, err := s.Create(ctx, request.CallerOf(ctx).Namespace, webhooks.Change{Name: &b.Name, URL: &b.URL, Secret: &b.SignatureSecret, Enabled: b.Enabled, Events: b.Events})
	if err != nil {
		return nil, err
	}
	out, err := h.webhook(&w)
	return api.CreateWebhook201JSONResponse(out), err
}

// GetWebhook is GET /events/webhooks/{webhookID}.
func (h *Handlers) GetWebhook(ctx context.Context, r api.GetWebhookRequestObject) (api.GetWebhookResponseObject, error) {
	s, err := h.webhooks()
	if err != nil {
		return nil, err
	}
	w, err := s.Get(ctx, request.CallerOf(ctx).Namespace, r.WebhookID)
	if err != nil {
		return nil, err
	}
	out, err := h.webhook(&w)
	return api.GetWebhook200JSONResponse(out), err
}

// UpdateWebhook is PATCH /events/webhooks/{webhookID}.
func (h *Handlers) UpdateWebhook(ctx context.Context, r api.UpdateWebhookRequestObject) (api.UpdateWebhookResponseObject, error) {
	s, err := h.webhooks()
	if err != nil {
		return nil, err
	}
	b := r.Body
	w, err := s.Update(ctx, request.CallerOf(ctx).Namespace, r.WebhookID, webhooks.Change{Name: b.Name, URL: b.URL, Secret: b.SignatureSecret, Enabled: b.Enabled, Events: b.Events})
	if err != nil {
		return nil, err
	}
	out, err := h.webhook(&w)
	return api.UpdateWebhook200JSONResponse(out), err
}

// DeleteWebhook is DELETE /events/webhooks/{webhookID}.
func (h *Handlers) DeleteWebhook(ctx context.Context, r api.DeleteWebhookRequestObject) (api.DeleteWebhookResponseObject, error) {
	s, err := h.webhooks()
	if err == nil {
		err = s.Delete(ctx, request.CallerOf(ctx).Namespace, r.WebhookID)
	}
	return api.DeleteWebhook200JSONResponse{}, err
}

// webhook adds how the deliveries went, where this process has that.
func (h *Handlers) webhook(w *webhooks.Webhook) (api.Webhook, error) {
	out := api.Webhook{ID: string(w.UID), TeamID: w.Namespace, Name: w.Name, URL: w.URL, Enabled: w.Enabled, Events: []string{}, CreatedAt: w.CreatedAt}
	for _, t := range w.Events {
		out.Events = append(out.Events, string(t))
	}
	if h.Manager.Events == nil {
		return out, nil
	}
	c, _, err := h.Manager.Events.Cursor(w.UID)
	if err != nil || c.EnabledAt != w.EnabledAt {
		return out, err
	}
	out.LastError, out.DisabledReason = request.Optional(c.LastError), request.Optional(c.Disabled)
	out.Enabled = out.Enabled && c.Disabled == ""
	if !c.FailingSince.IsZero() {
		out.FailingSince = &c.FailingSince
	}
	if c.Lost > 0 {
		out.Lost = new(int64(c.Lost)) //nolint:gosec // a count of events
	}
	return out, nil
}
