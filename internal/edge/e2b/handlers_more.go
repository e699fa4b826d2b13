package e2b

import (
	"context"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// GetSandboxMetrics is GET /sandboxes/{sandboxID}/metrics.
func (h *handlers) GetSandboxMetrics(ctx context.Context, r GetSandboxMetricsRequestObject) (GetSandboxMetricsResponseObject, error) {
	samples, err := h.manager.Sandboxes.Metrics(ctx, callerOf(ctx).Namespace, r.SandboxID, instant(r.Params.Start, time.Second), instant(r.Params.End, time.Second))
	if err != nil {
		return nil, err
	}
	out := make(GetSandboxMetrics200JSONResponse, len(samples))
	for i, m := range samples {
		out[i] = metric(m)
	}
	return out, nil
}

// ListSandboxMetrics is GET /sandboxes/metrics.
func (h *handlers) ListSandboxMetrics(ctx context.Context, r ListSandboxMetricsRequestObject) (ListSandboxMetricsResponseObject, error) {
	samples, err := h.manager.Sandboxes.MetricsOf(ctx, callerOf(ctx).Namespace, r.Params.SandboxIds)
	if err != nil {
		return nil, err
	}
	out := ListSandboxMetrics200JSONResponse{Sandboxes: make(map[string]SandboxMetric, len(samples))}
	for id, m := range samples {
		out.Sandboxes[id] = metric(m)
	}
	return out, nil
}

// GetSandboxLogs is GET /sandboxes/{sandboxID}/logs.
func (h *handlers) GetSandboxLogs(ctx context.Context, r GetSandboxLogsRequestObject) (GetSandboxLogsResponseObject, error) {
	limit, err := limitOf(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	lines, err := h.manager.Sandboxes.Logs(ctx, callerOf(ctx).Namespace, r.SandboxID, sandboxes.LogRequest{From: instant(r.Params.Start, time.Millisecond), Limit: limit})
	if err != nil {
		return nil, err
	}
	logs := SandboxLogs{LogEntries: entries(lines), Logs: make([]SandboxLog, len(lines))}
	for i, e := range logs.LogEntries {
		logs.Logs[i] = SandboxLog{Timestamp: e.Timestamp, Line: logLine(e)}
	}
	return GetSandboxLogs200JSONResponse(logs), nil
}

// GetSandboxLogsV2 is GET /v2/sandboxes/{sandboxID}/logs.
func (h *handlers) GetSandboxLogsV2(ctx context.Context, r GetSandboxLogsV2RequestObject) (GetSandboxLogsV2ResponseObject, error) {
	p := r.Params
	limit, err := limitOf(p.Limit)
	if err != nil {
		return nil, err
	}
	if err := checkLogs(p.Direction, p.Level); err != nil {
		return nil, err
	}
	lines, err := h.manager.Sandboxes.Logs(ctx, callerOf(ctx).Namespace, r.SandboxID, sandboxes.LogRequest{
		From: instant(p.Cursor, time.Millisecond), Backward: deref(p.Direction) == Backward, Limit: limit,
		Contains: deref(p.Search), AtLeast: levelNamed(deref(p.Level)),
	})
	if err != nil {
		return nil, err
	}
	return GetSandboxLogsV2200JSONResponse{Logs: entries(lines)}, nil
}

func checkLogs(direction *LogsDirection, level *LogLevel) error {
	if direction != nil && !direction.Valid() {
		return invalid("direction: %q is none of forward and backward", *direction)
	}
	if level != nil && !level.Valid() {
		return invalid("level: %q is none of debug, info, warn and error", *level)
	}
	return nil
}

func entries(lines []envd.LogLine) []SandboxLogEntry {
	out := make([]SandboxLogEntry, len(lines))
	for i, l := range lines {
		out[i] = logEntry(l)
	}
	return out
}

// instant reads a Unix time in some unit; nil is the zero time.
func instant(n *int64, unit time.Duration) time.Time {
	switch {
	case n == nil:
		return time.Time{}
	case unit == time.Millisecond:
		return time.UnixMilli(*n)
	default:
		return time.Unix(*n, 0)
	}
}

// ListTemplates is GET /templates.
func (h *handlers) ListTemplates(ctx context.Context, _ ListTemplatesRequestObject) (ListTemplatesResponseObject, error) {
	all, err := h.manager.Templates.All(ctx, callerOf(ctx).Namespace)
	if err != nil {
		return nil, err
	}
	return ListTemplates200JSONResponse(templateList(all)), nil
}

// ListTemplatesV2 is GET /v2/templates.
func (h *handlers) ListTemplatesV2(ctx context.Context, r ListTemplatesV2RequestObject) (ListTemplatesV2ResponseObject, error) {
	limit, err := limitOf(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	page, next, err := h.manager.Templates.List(ctx, callerOf(ctx).Namespace, limit, deref(r.Params.NextToken))
	if err != nil {
		return nil, err
	}
	return templatePage{templateList(page), next}, nil
}

func templateList(list []templates.Template) []Template {
	out := make([]Template, len(list))
	for i, t := range list {
		out[i] = template(t)
	}
	return out
}

type templatePage struct {
	items []Template
	next  string
}

// VisitListTemplatesV2Response implements the generated interface.
func (p templatePage) VisitListTemplatesV2Response(w http.ResponseWriter) error {
	return writePage(w, p.items, p.next)
}

// GetTemplate is GET /templates/{templateID}.
func (h *handlers) GetTemplate(ctx context.Context, r GetTemplateRequestObject) (GetTemplateResponseObject, error) {
	t, err := h.manager.Templates.Get(ctx, callerOf(ctx).Namespace, r.TemplateID)
	if err != nil {
		return nil, err
	}
	out := templateWithBuilds(t)
	if h.manager.Builds == nil || t.Build == "" || t.Namespace != callerOf(ctx).Namespace {
		return GetTemplate200JSONResponse(out), nil
	}
	list, err := h.manager.Builds.List(ctx, types.NamespacedName{Namespace: t.Namespace, Name: t.Object})
	if err != nil {
		return nil, err
	}
	if len(list) > 0 {
		out.Builds = templateBuilds(t, list)
	}
	return GetTemplate200JSONResponse(out), nil
}

// GetTemplateAlias is GET /templates/aliases/{alias}.
func (h *handlers) GetTemplateAlias(ctx context.Context, r GetTemplateAliasRequestObject) (GetTemplateAliasResponseObject, error) {
	t, err := h.manager.Templates.Get(ctx, callerOf(ctx).Namespace, r.Alias)
	if err != nil {
		return nil, err
	}
	return GetTemplateAlias200JSONResponse{TemplateID: t.ID, Public: t.Public}, nil
}

// ListTeams is GET /teams: exactly the caller's own namespace.
func (h *handlers) ListTeams(ctx context.Context, _ ListTeamsRequestObject) (ListTeamsResponseObject, error) {
	who := callerOf(ctx)
	return ListTeams200JSONResponse{{TeamID: who.Namespace, Name: who.Namespace, APIKey: who.secret, IsDefault: true}}, nil
}

// ListAPIKeys is GET /api-keys.
func (h *handlers) ListAPIKeys(ctx context.Context, _ ListAPIKeysRequestObject) (ListAPIKeysResponseObject, error) {
	keys, err := h.manager.Keys.List(ctx, callerOf(ctx).Namespace)
	if err != nil {
		return nil, err
	}
	out := make(ListAPIKeys200JSONResponse, len(keys))
	for i, k := range keys {
		out[i] = APIKey{ID: k.ID, Name: k.Description, Mask: keyMask(k), CreatedAt: k.CreatedAt, ExpiresAt: k.ExpiresAt}
	}
	return out, nil
}

// CreateAPIKey is POST /api-keys.
func (h *handlers) CreateAPIKey(ctx context.Context, r CreateAPIKeyRequestObject) (CreateAPIKeyResponseObject, error) {
	k, secret, err := h.manager.Keys.Create(ctx, callerOf(ctx).Identity, r.Body.Name, r.Body.ExpiresAt)
	if err != nil {
		return nil, err
	}
	return CreateAPIKey201JSONResponse{ID: k.ID, Key: secret, Name: k.Description, Mask: keyMask(k), CreatedAt: k.CreatedAt, ExpiresAt: k.ExpiresAt}, nil
}

// DeleteAPIKey is DELETE /api-keys/{apiKeyID}.
func (h *handlers) DeleteAPIKey(ctx context.Context, r DeleteAPIKeyRequestObject) (DeleteAPIKeyResponseObject, error) {
	if err := h.manager.Keys.Delete(ctx, callerOf(ctx).Namespace, r.APIKeyID); err != nil {
		return nil, err
	}
	return DeleteAPIKey204Response{}, nil
}
