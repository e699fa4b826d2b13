package sandboxes

import (
	"context"
	"time"

	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// GetSandboxMetrics is GET /sandboxes/{sandboxID}/metrics.
func (h *Handlers) GetSandboxMetrics(ctx context.Context, r api.GetSandboxMetricsRequestObject) (api.GetSandboxMetricsResponseObject, error) {
	samples, err := h.Manager.Sandboxes.Metrics(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, request.Instant(r.Params.Start, time.Second), request.Instant(r.Params.End, time.Second))
	if err != nil {
		return nil, err
	}
	out := make(api.GetSandboxMetrics200JSONResponse, len(samples))
	for i, m := range samples {
		out[i] = metric(m)
	}
	return out, nil
}

// ListSandboxMetrics is GET /sandboxes/metrics.
func (h *Handlers) ListSandboxMetrics(ctx context.Context, r api.ListSandboxMetricsRequestObject) (api.ListSandboxMetricsResponseObject, error) {
	samples, err := h.Manager.Sandboxes.MetricsOf(ctx, request.CallerOf(ctx).Namespace, r.Params.SandboxIds)
	if err != nil {
		return nil, err
	}
	out := api.ListSandboxMetrics200JSONResponse{Sandboxes: make(map[string]api.SandboxMetric, len(samples))}
	for id, m := range samples {
		out.Sandboxes[id] = metric(m)
	}
	return out, nil
}

// TraceSandboxNetwork is GET /sandboxes/{sandboxID}/network/trace.
func (h *Handlers) TraceSandboxNetwork(ctx context.Context, r api.TraceSandboxNetworkRequestObject) (api.TraceSandboxNetworkResponseObject, error) {
	q := sandboxes.EgressQuery{Destination: r.Params.Destination, Port: 443, Protocol: "tcp"}
	if r.Params.Port != nil {
		q.Port = *r.Params.Port
	}
	if r.Params.Protocol != nil {
		q.Protocol = *r.Params.Protocol
	}
	d, err := h.Manager.Sandboxes.Egress(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, q)
	if err != nil {
		return nil, err
	}
	return api.TraceSandboxNetwork200JSONResponse{
		Destination: q.Destination, Port: q.Port, Protocol: q.Protocol,
		Verdict: api.EgressDecisionVerdict(d.Verdict), Rule: d.Rule, Source: api.EgressDecisionSource(d.Source),
	}, nil
}

// GetSandboxLogs is GET /sandboxes/{sandboxID}/logs.
func (h *Handlers) GetSandboxLogs(ctx context.Context, r api.GetSandboxLogsRequestObject) (api.GetSandboxLogsResponseObject, error) {
	limit, err := request.Limit(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	lines, err := h.Manager.Sandboxes.Logs(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, sandboxes.LogRequest{From: request.Instant(r.Params.Start, time.Millisecond), Limit: limit})
	if err != nil {
		return nil, err
	}
	logs := api.SandboxLogs{LogEntries: entries(lines), Logs: make([]api.SandboxLog, len(lines))}
	for i, e := range logs.LogEntries {
		logs.Logs[i] = api.SandboxLog{Timestamp: e.Timestamp, Line: logLine(e)}
	}
	return api.GetSandboxLogs200JSONResponse(logs), nil
}

// GetSandboxLogsV2 is GET /v2/sandboxes/{sandboxID}/logs.
func (h *Handlers) GetSandboxLogsV2(ctx context.Context, r api.GetSandboxLogsV2RequestObject) (api.GetSandboxLogsV2ResponseObject, error) {
	p := r.Params
	limit, err := request.Limit(p.Limit)
	if err != nil {
		return nil, err
	}
	if err := request.CheckLogs(p.Direction, p.Level); err != nil {
		return nil, err
	}
	lines, err := h.Manager.Sandboxes.Logs(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, sandboxes.LogRequest{
		From: request.Instant(p.Cursor, time.Millisecond), Backward: request.Deref(p.Direction) == api.Backward, Limit: limit,
		Contains: request.Deref(p.Search), Container: request.Deref(p.Container), AtLeast: request.LevelNamed(request.Deref(p.Level)),
	})
	if err != nil {
		return nil, err
	}
	return api.GetSandboxLogsV2200JSONResponse{Logs: entries(lines)}, nil
}

func entries(lines []envd.LogLine) []api.SandboxLogEntry {
	out := make([]api.SandboxLogEntry, len(lines))
	for i, l := range lines {
		out[i] = logEntry(l)
	}
	return out
}
