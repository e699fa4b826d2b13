package events

import (
	"context"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/events"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// Defaults and limits of the wire format.
const (
	defaultLimit = 10
	maxLimit     = 100
	// maxOffset bounds what one request reads.
	maxOffset       = 100_000
	defaultInterval = 24 * time.Hour
	maxInterval     = 366 * 24 * time.Hour
)

// Handlers serves events, webhooks and what follows from events.
type Handlers struct {
	Manager *manager.Manager
}

// noEvents is the error of a cluster.
func noEvents() error {
	return request.Unavailable("events and metrics of teams: not available on a Kubernetes cluster, where no process records events; watch the Sandboxes by the Kubernetes API")
}

// ListSandboxEvents is GET /events/sandboxes.
func (h *Handlers) ListSandboxEvents(ctx context.Context, r api.ListSandboxEventsRequestObject) (api.ListSandboxEventsResponseObject, error) {
	list, err := h.list(ctx, "", r.Params)
	if err != nil {
		return nil, err
	}
	return api.ListSandboxEvents200JSONResponse(list), nil
}

// ListEventsOfSandbox is GET /events/sandboxes/{sandboxID}.
func (h *Handlers) ListEventsOfSandbox(ctx context.Context, r api.ListEventsOfSandboxRequestObject) (api.ListEventsOfSandboxResponseObject, error) {
	id, err := sandbox.ParseID(r.SandboxID)
	if err != nil {
		return nil, request.Invalid("sandboxID: %.40q is not the ID of a sandbox", r.SandboxID)
	}
	list, err := h.list(ctx, string(id), api.ListSandboxEventsParams(r.Params))
	if err != nil {
		return nil, err
	}
	return api.ListEventsOfSandbox200JSONResponse(list), nil
}

func (h *Handlers) list(ctx context.Context, id string, p api.ListSandboxEventsParams) ([]events.Event, error) {
	if h.Manager.Events == nil {
		return nil, noEvents()
	}
	q := events.Query{Namespace: request.CallerOf(ctx).Namespace, SandboxID: id, Limit: defaultLimit, OldestFirst: request.Deref(p.OrderAsc)}
	if p.Limit != nil {
		if q.Limit = int(*p.Limit); q.Limit < 1 || q.Limit > maxLimit {
			return nil, request.Invalid("limit: must be from 1 to %d", maxLimit)
		}
	}
	if q.Offset = int(request.Deref(p.Offset)); q.Offset < 0 || q.Offset > maxOffset {
		return nil, request.Invalid("offset: must be from 0 to %d", maxOffset)
	}
	for _, t := range request.Deref(p.Types) {
		if !events.Type(t).Known() {
			return nil, request.Invalid("types: %.80q is none of %v", t, events.Types())
		}
		q.Types = append(q.Types, events.Type(t))
	}
	return h.Manager.Events.List(q)
}

// GetTeamMetrics is GET /teams/{teamID}/metrics.
func (h *Handlers) GetTeamMetrics(ctx context.Context, r api.GetTeamMetricsRequestObject) (api.GetTeamMetricsResponseObject, error) {
	list, err := h.samples(ctx, r.TeamID, r.Params.Start, r.Params.End)
	if err != nil {
		return nil, err
	}
	out := make(api.GetTeamMetrics200JSONResponse, len(list))
	for i, s := range list {
		out[i] = api.TeamMetric{Timestamp: s.At.UTC(), TimestampUnix: s.At.Unix(), ConcurrentSandboxes: int32(s.Running), SandboxStartRate: s.Rate}
	}
	return out, nil
}

// GetTeamMetricsMax is GET /teams/{teamID}/metrics/max.
func (h *Handlers) GetTeamMetricsMax(ctx context.Context, r api.GetTeamMetricsMaxRequestObject) (api.GetTeamMetricsMaxResponseObject, error) {
	if !r.Params.Metric.Valid() {
		return nil, request.Invalid("metric: %.80q is none of concurrent_sandboxes and sandbox_start_rate", r.Params.Metric)
	}
	list, err := h.samples(ctx, r.TeamID, r.Params.Start, r.Params.End)
	if err != nil {
		return nil, err
	}
	most := api.GetTeamMetricsMax200JSONResponse{Value: -1}
	for _, s := range list {
		value := float64(s.Running)
		if r.Params.Metric == api.MetricSandboxStartRate {
			value = s.Rate
		}
		if value > most.Value {
			most = api.GetTeamMetricsMax200JSONResponse{Timestamp: s.At.UTC(), TimestampUnix: s.At.Unix(), Value: value}
		}
	}
	return most, nil
}

// samples returns at least one.
func (h *Handlers) samples(ctx context.Context, team string, start, end *int64) ([]events.Sample, error) {
	namespace := request.CallerOf(ctx).Namespace
	if team != namespace {
		return nil, errs.Public(errs.ErrForbidden, "the key is of another team")
	}
	if h.Manager.Events == nil {
		return nil, noEvents()
	}
	to := time.Now().Truncate(time.Second)
	if end != nil {
		to = time.Unix(*end, 0)
	}
	from := to.Add(-defaultInterval)
	if start != nil {
		from = time.Unix(*start, 0)
	}
	if !from.Before(to) || to.Sub(from) > maxInterval {
		return nil, request.Invalid("start: must be before end, by at most %d days", int(maxInterval.Hours()/24))
	}
	return h.Manager.Events.Samples(namespace, from, to)
}
