package sandboxes

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// timeoutV1 is the default of the wire format's first version.
const timeoutV1 = 15 * time.Second

// Handlers serves sandboxes and snapshots.
type Handlers struct {
	request.Errors
	Manager *manager.Manager
	// DefaultTimeout is the time to live of a sandbox made or connected to by the v2 routes without a timeout.
	DefaultTimeout time.Duration
}

// CreateSandbox is POST /sandboxes.
func (h *Handlers) CreateSandbox(ctx context.Context, r api.CreateSandboxRequestObject) (api.CreateSandboxResponseObject, error) {
	v, err := h.create(ctx, r.Body, r.Params.IdempotencyKey, r.Params.BarchanQueueTimeout, r.Body.Secure == nil || *r.Body.Secure, timeoutV1)
	if err != nil {
		return nil, err
	}
	request.Made(ctx, string(v.ID))
	return api.CreateSandbox201JSONResponse(h.sandbox(ctx, v)), nil
}

// CreateSandboxV2 is POST /v2/sandboxes.
func (h *Handlers) CreateSandboxV2(ctx context.Context, r api.CreateSandboxV2RequestObject) (api.CreateSandboxV2ResponseObject, error) {
	v, err := h.create(ctx, r.Body, r.Params.IdempotencyKey, r.Params.BarchanQueueTimeout, true, h.DefaultTimeout)
	if err != nil {
		return nil, err
	}
	request.Made(ctx, string(v.ID))
	return api.CreateSandboxV2201JSONResponse(h.sandbox(ctx, v)), nil
}

func (h *Handlers) create(ctx context.Context, b *api.NewSandbox, key *api.IdempotencyKey, queue *api.QueueTimeout, secure bool, timeout time.Duration) (sandboxes.Sandbox, error) {
	if err := refuseUnavailable(b); err != nil {
		return sandboxes.Sandbox{}, err
	}
	if key != nil && *key == "" { // the manager takes this for none
		return sandboxes.Sandbox{}, request.Invalid("Idempotency-Key: must not be empty")
	}
	if b.Timeout != nil {
		timeout = request.Seconds(*b.Timeout)
	}
	n, who := request.Deref(b.Network), request.CallerOf(ctx)
	req := creating.Request{
		Namespace:       who.Namespace,
		Key:             who.Key,
		Template:        b.TemplateID,
		Timeout:         timeout,
		Env:             request.Deref(b.EnvVars),
		Metadata:        request.Deref(b.Metadata),
		Secure:          secure,
		AutoResume:      request.Deref(request.Deref(b.AutoResume).Enabled),
		PublicTraffic:   n.AllowPublicTraffic,
		MaskRequestHost: request.Deref(n.MaskRequestHost),
		Network:         egress(b.AllowInternetAccess, n.AllowOut, n.DenyOut),
		FilesOnly:       b.Memory != nil && !*b.Memory,
		AllowSecrets:    request.Deref(b.AllowSecrets),
		IdempotencyKey:  request.Deref(key),
		QueueTimeout:    request.Seconds(request.Deref(queue)),
	}
	for _, m := range request.Deref(b.VolumeMounts) {
		req.VolumeMounts = append(req.VolumeMounts, volumes.Mount{Name: m.Name, Path: m.Path})
	}
	if b.AutoPause != nil {
		req.OnTimeout = agents.TimeoutShutdown
		if *b.AutoPause {
			req.OnTimeout = agents.TimeoutPause
		}
	}
	if b.AutoPauseMemory != nil && !*b.AutoPauseMemory {
		req.Suspend = agents.SuspendFiles
	}
	return h.Manager.Creates.Create(ctx, req)
}

// refuseUnavailable rejects requested features that are not available.
func refuseUnavailable(b *api.NewSandbox) error {
	n := request.Deref(b.Network)
	switch {
	case len(request.Deref(b.Iam)) > 0:
		return request.Invalid("iam: workload identity is not available on this server yet")
	case len(n.HTTPSPorts) > 0:
		return request.Invalid("network.httpsPorts: not available on this server yet")
	}
	return refuseRules("network.", n.Rules, n.EgressProxy)
}

func refuseRules(at string, rules, proxy *map[string]any) error {
	switch {
	case len(request.Deref(rules)) > 0:
		return request.Invalid("%srules: rewriting requests is not available on this server yet", at)
	case proxy != nil:
		return request.Invalid("%segressProxy: not available on this server yet", at)
	}
	return nil
}

// ConnectSandbox is POST /sandboxes/{sandboxID}/connect.
func (h *Handlers) ConnectSandbox(ctx context.Context, r api.ConnectSandboxRequestObject) (api.ConnectSandboxResponseObject, error) {
	if r.Body.Timeout == nil {
		return nil, request.Invalid("timeout: is required")
	}
	v, resumed, err := h.Manager.Sandboxes.Connect(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, request.Seconds(*r.Body.Timeout), r.Body.Memory)
	if err != nil {
		return nil, err
	}
	if resumed {
		return api.ConnectSandbox201JSONResponse(h.sandbox(ctx, v)), nil
	}
	return api.ConnectSandbox200JSONResponse(h.sandbox(ctx, v)), nil
}

// ConnectSandboxV2 is POST /v2/sandboxes/{sandboxID}/connect.
func (h *Handlers) ConnectSandboxV2(ctx context.Context, r api.ConnectSandboxV2RequestObject) (api.ConnectSandboxV2ResponseObject, error) {
	timeout, body := h.DefaultTimeout, request.Deref(r.Body)
	if body.Timeout != nil {
		timeout = request.Seconds(*body.Timeout)
	}
	v, resumed, err := h.Manager.Sandboxes.Connect(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, timeout, body.Memory)
	if err != nil {
		return nil, err
	}
	if resumed {
		return api.ConnectSandboxV2201JSONResponse(h.sandbox(ctx, v)), nil
	}
	return api.ConnectSandboxV2200JSONResponse(h.sandbox(ctx, v)), nil
}

// ListSandboxes is GET /sandboxes: all running ones, on one page.
func (h *Handlers) ListSandboxes(ctx context.Context, r api.ListSandboxesRequestObject) (api.ListSandboxesResponseObject, error) {
	metadata, err := request.Metadata(request.Deref(r.Params.Metadata))
	if err != nil {
		return nil, err
	}
	running, err := h.Manager.Sandboxes.All(ctx, sandboxes.ListRequest{Namespace: request.CallerOf(ctx).Namespace, Metadata: metadata, States: []sandboxes.State{sandboxes.StateRunning}})
	if err != nil {
		return nil, err
	}
	all := make(api.ListSandboxes200JSONResponse, len(running))
	for i, v := range running {
		all[i] = h.listed(ctx, v)
	}
	return all, nil
}

// ListSandboxesV2 is GET /v2/sandboxes.
func (h *Handlers) ListSandboxesV2(ctx context.Context, r api.ListSandboxesV2RequestObject) (api.ListSandboxesV2ResponseObject, error) {
	p := r.Params
	metadata, err := request.Metadata(request.Deref(p.Metadata))
	if err != nil {
		return nil, err
	}
	limit, err := request.Limit(p.Limit)
	if err != nil {
		return nil, err
	}
	req := sandboxes.ListRequest{
		Namespace: request.CallerOf(ctx).Namespace, Metadata: metadata, Template: request.Deref(p.Template), Name: request.Deref(p.Name),
		StartedAfter: request.Deref(p.StartedAfter), Limit: limit, Cursor: request.Deref(p.NextToken),
	}
	for _, state := range request.Deref(p.State) {
		if !state.Valid() {
			return nil, request.Invalid("state: %q is none of running and paused", state)
		}
		req.States = append(req.States, sandboxes.State(state))
	}
	if order := request.Deref(p.Order); order != "" {
		if !order.Valid() {
			return nil, request.Invalid("order: %q is none of asc and desc", order)
		}
		req.OldestFirst = order == api.OrderAsc
	}
	page, err := h.Manager.Sandboxes.List(ctx, req)
	if err != nil {
		return nil, err
	}
	out := sandboxPage{items: make([]api.ListedSandbox, len(page.Items)), next: page.Next, running: page.Running}
	for i, v := range page.Items {
		out.items[i] = h.listed(ctx, v)
	}
	return out, nil
}

// sandboxPage is a list with its headers.
type sandboxPage struct {
	items   []api.ListedSandbox
	next    string
	running int
}

// VisitListSandboxesV2Response implements the generated interface.
func (p sandboxPage) VisitListSandboxesV2Response(w http.ResponseWriter) error {
	w.Header().Set("X-Total-Running", strconv.Itoa(p.running))
	return request.WritePage(w, p.items, p.next)
}

// GetSandbox is GET /sandboxes/{sandboxID}.
func (h *Handlers) GetSandbox(ctx context.Context, r api.GetSandboxRequestObject) (api.GetSandboxResponseObject, error) {
	v, err := h.Manager.Sandboxes.Get(ctx, request.CallerOf(ctx).Namespace, r.SandboxID)
	if err != nil {
		return nil, err
	}
	return api.GetSandbox200JSONResponse(h.detail(ctx, v)), nil
}

// KillSandbox is DELETE /sandboxes/{sandboxID}.
func (h *Handlers) KillSandbox(ctx context.Context, r api.KillSandboxRequestObject) (api.KillSandboxResponseObject, error) {
	if err := h.Manager.Sandboxes.Kill(ctx, request.CallerOf(ctx).Namespace, r.SandboxID); err != nil {
		return nil, err
	}
	return api.KillSandbox204Response{}, nil
}

// SetSandboxTimeout is POST /sandboxes/{sandboxID}/timeout.
func (h *Handlers) SetSandboxTimeout(ctx context.Context, r api.SetSandboxTimeoutRequestObject) (api.SetSandboxTimeoutResponseObject, error) {
	if err := h.Manager.Sandboxes.SetTimeout(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, request.Seconds(r.Body.Timeout)); err != nil {
		return nil, err
	}
	return api.SetSandboxTimeout204Response{}, nil
}

// RefreshSandbox is POST /sandboxes/{sandboxID}/refreshes.
func (h *Handlers) RefreshSandbox(ctx context.Context, r api.RefreshSandboxRequestObject) (api.RefreshSandboxResponseObject, error) {
	if err := h.Manager.Sandboxes.Refresh(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, request.Seconds(request.Deref(request.Deref(r.Body).Duration))); err != nil {
		return nil, err
	}
	return api.RefreshSandbox204Response{}, nil
}

// PauseSandbox is POST /sandboxes/{sandboxID}/pause.
func (h *Handlers) PauseSandbox(ctx context.Context, r api.PauseSandboxRequestObject) (api.PauseSandboxResponseObject, error) {
	namespace, memory := request.CallerOf(ctx).Namespace, request.Deref(r.Body).Memory
	err := h.Manager.Sandboxes.Pause(ctx, namespace, r.SandboxID, memory)
	if errors.Is(err, errs.ErrConflict) && memory != nil && !*memory {
		return nil, h.staysPaused(ctx, namespace, r.SandboxID, err)
	}
	if err != nil {
		return nil, err
	}
	return api.PauseSandbox204Response{}, nil
}

// staysPaused adds to an error how to give up the memory of a paused sandbox: not by another pause.
func (h *Handlers) staysPaused(ctx context.Context, namespace, id string, refused error) error {
	v, err := h.Manager.Sandboxes.Get(ctx, namespace, id)
	if err != nil || v.State != sandboxes.StatePaused {
		return refused
	}
	return errs.Public(refused, fmt.Sprintf("Sandbox %q is already paused, and keeps what it was paused with; "+
		"a connect with memory: false (barchan resume --files-only) gives up memory that it has", id))
}

// ResumeSandbox is POST /sandboxes/{sandboxID}/resume.
func (h *Handlers) ResumeSandbox(ctx context.Context, r api.ResumeSandboxRequestObject) (api.ResumeSandboxResponseObject, error) {
	timeout, body := timeoutV1, request.Deref(r.Body)
	if body.Timeout != nil {
		timeout = request.Seconds(*body.Timeout)
	}
	v, err := h.Manager.Sandboxes.Resume(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, timeout, body.Memory)
	if err != nil {
		return nil, err
	}
	return api.ResumeSandbox201JSONResponse(h.sandbox(ctx, v)), nil
}

// UpdateSandboxNetwork is PUT /sandboxes/{sandboxID}/network.
func (h *Handlers) UpdateSandboxNetwork(ctx context.Context, r api.UpdateSandboxNetworkRequestObject) (api.UpdateSandboxNetworkResponseObject, error) {
	if err := refuseRules("", r.Body.Rules, r.Body.EgressProxy); err != nil {
		return nil, err
	}
	policy := egress(r.Body.AllowInternetAccess, r.Body.AllowOut, r.Body.DenyOut)
	if err := h.Manager.Sandboxes.SetNetwork(ctx, request.CallerOf(ctx).Namespace, r.SandboxID, policy); err != nil {
		return nil, err
	}
	return api.UpdateSandboxNetwork204Response{}, nil
}
