package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
)

// handlers implements the generated StrictServerInterface.
type handlers struct{ *Server }

var _ StrictServerInterface = (*handlers)(nil)

// CreateSandbox is POST /sandboxes.
func (h *handlers) CreateSandbox(ctx context.Context, r CreateSandboxRequestObject) (CreateSandboxResponseObject, error) {
	v, err := h.create(ctx, r.Body, r.Params.IdempotencyKey, r.Params.BarchanQueueTimeout, r.Body.Secure == nil || *r.Body.Secure, defaultTimeoutV1)
	if err != nil {
		return nil, err
	}
	return CreateSandbox201JSONResponse(h.sandbox(ctx, v)), nil
}

// CreateSandboxV2 is POST /v2/sandboxes.
func (h *handlers) CreateSandboxV2(ctx context.Context, r CreateSandboxV2RequestObject) (CreateSandboxV2ResponseObject, error) {
	v, err := h.create(ctx, r.Body, r.Params.IdempotencyKey, r.Params.BarchanQueueTimeout, true, h.defaultTimeout)
	if err != nil {
		return nil, err
	}
	return CreateSandboxV2201JSONResponse(h.sandbox(ctx, v)), nil
}

func (h *handlers) create(ctx context.Context, b *NewSandbox, key *IdempotencyKey, queue *QueueTimeout, secure bool, timeout time.Duration) (sandboxes.Sandbox, error) {
	if err := refuseUnavailable(b); err != nil {
		return sandboxes.Sandbox{}, err
	}
	if key != nil && *key == "" { // the manager takes this for none
		return sandboxes.Sandbox{}, invalid("Idempotency-Key: must not be empty")
	}
	if b.Timeout != nil {
		timeout = seconds(*b.Timeout)
	}
	n := deref(b.Network)
	req := creating.Request{
		Namespace:       callerOf(ctx).Namespace,
		Template:        b.TemplateID,
		Timeout:         timeout,
		Env:             deref(b.EnvVars),
		Metadata:        deref(b.Metadata),
		Secure:          secure,
		AutoResume:      deref(deref(b.AutoResume).Enabled),
		PublicTraffic:   n.AllowPublicTraffic,
		MaskRequestHost: deref(n.MaskRequestHost),
		Network:         egress(b.AllowInternetAccess, n.AllowOut, n.DenyOut),
		FilesOnly:       b.Memory != nil && !*b.Memory,
		AllowSecrets:    deref(b.AllowSecrets),
		IdempotencyKey:  deref(key),
		QueueTimeout:    seconds(deref(queue)),
	}
	for _, m := range deref(b.VolumeMounts) {
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
	return h.manager.Creates.Create(ctx, req)
}

// refuseUnavailable rejects requested features that are not available.
func refuseUnavailable(b *NewSandbox) error {
	n := deref(b.Network)
	switch {
	case len(deref(b.Iam)) > 0:
		return invalid("iam: workload identity is not available on this server yet")
	case len(n.HTTPSPorts) > 0:
		return invalid("network.httpsPorts: not available on this server yet")
	}
	return refuseRules("network.", n.Rules, n.EgressProxy)
}

func refuseRules(at string, rules, proxy *map[string]any) error {
	switch {
	case len(deref(rules)) > 0:
		return invalid("%srules: rewriting requests is not available on this server yet", at)
	case proxy != nil:
		return invalid("%segressProxy: not available on this server yet", at)
	}
	return nil
}

// ConnectSandbox is POST /sandboxes/{sandboxID}/connect.
func (h *handlers) ConnectSandbox(ctx context.Context, r ConnectSandboxRequestObject) (ConnectSandboxResponseObject, error) {
	if r.Body.Timeout == nil {
		return nil, invalid("timeout: is required")
	}
	v, resumed, err := h.manager.Sandboxes.Connect(ctx, callerOf(ctx).Namespace, r.SandboxID, seconds(*r.Body.Timeout), r.Body.Memory)
	if err != nil {
		return nil, err
	}
	if resumed {
		return ConnectSandbox201JSONResponse(h.sandbox(ctx, v)), nil
	}
	return ConnectSandbox200JSONResponse(h.sandbox(ctx, v)), nil
}

// ConnectSandboxV2 is POST /v2/sandboxes/{sandboxID}/connect.
func (h *handlers) ConnectSandboxV2(ctx context.Context, r ConnectSandboxV2RequestObject) (ConnectSandboxV2ResponseObject, error) {
	timeout, body := h.defaultTimeout, deref(r.Body)
	if body.Timeout != nil {
		timeout = seconds(*body.Timeout)
	}
	v, resumed, err := h.manager.Sandboxes.Connect(ctx, callerOf(ctx).Namespace, r.SandboxID, timeout, body.Memory)
	if err != nil {
		return nil, err
	}
	if resumed {
		return ConnectSandboxV2201JSONResponse(h.sandbox(ctx, v)), nil
	}
	return ConnectSandboxV2200JSONResponse(h.sandbox(ctx, v)), nil
}

// ListSandboxes is GET /sandboxes: all running ones, on one page.
func (h *handlers) ListSandboxes(ctx context.Context, r ListSandboxesRequestObject) (ListSandboxesResponseObject, error) {
	metadata, err := parseMetadata(deref(r.Params.Metadata))
	if err != nil {
		return nil, err
	}
	req := sandboxes.ListRequest{Namespace: callerOf(ctx).Namespace, Metadata: metadata, States: []sandboxes.State{sandboxes.StateRunning}}
	all := ListSandboxes200JSONResponse{}
	for {
		page, err := h.manager.Sandboxes.List(ctx, req)
		if err != nil {
			return nil, err
		}
		for _, v := range page.Items {
			all = append(all, h.listed(ctx, v))
		}
		if req.Cursor = page.Next; req.Cursor == "" {
			return all, nil
		}
	}
}

// ListSandboxesV2 is GET /v2/sandboxes.
func (h *handlers) ListSandboxesV2(ctx context.Context, r ListSandboxesV2RequestObject) (ListSandboxesV2ResponseObject, error) {
	p := r.Params
	metadata, err := parseMetadata(deref(p.Metadata))
	if err != nil {
		return nil, err
	}
	limit, err := limitOf(p.Limit)
	if err != nil {
		return nil, err
	}
	req := sandboxes.ListRequest{
		Namespace: callerOf(ctx).Namespace, Metadata: metadata, Template: deref(p.Template), Name: deref(p.Name),
		StartedAfter: deref(p.StartedAfter), Limit: limit, Cursor: deref(p.NextToken),
	}
	for _, state := range deref(p.State) {
		if !state.Valid() {
			return nil, invalid("state: %q is none of running and paused", state)
		}
		req.States = append(req.States, sandboxes.State(state))
	}
	if order := deref(p.Order); order != "" {
		if !order.Valid() {
			return nil, invalid("order: %q is none of asc and desc", order)
		}
		req.OldestFirst = order == OrderAsc
	}
	page, err := h.manager.Sandboxes.List(ctx, req)
	if err != nil {
		return nil, err
	}
	out := sandboxPage{items: make([]ListedSandbox, len(page.Items)), next: page.Next, running: page.Running}
	for i, v := range page.Items {
		out.items[i] = h.listed(ctx, v)
	}
	return out, nil
}

// sandboxPage is a list with its headers.
type sandboxPage struct {
	items   []ListedSandbox
	next    string
	running int
}

// VisitListSandboxesV2Response implements the generated interface.
func (p sandboxPage) VisitListSandboxesV2Response(w http.ResponseWriter) error {
	w.Header().Set("X-Total-Running", strconv.Itoa(p.running))
	return writePage(w, p.items, p.next)
}

// writePage omits the header of the next page on the last one.
func writePage(w http.ResponseWriter, items any, next string) error {
	w.Header().Set("Content-Type", "application/json")
	if next != "" {
		w.Header().Set("X-Next-Token", next)
	}
	w.WriteHeader(http.StatusOK)
	return json.NewEncoder(w).Encode(items)
}

// GetSandbox is GET /sandboxes/{sandboxID}.
func (h *handlers) GetSandbox(ctx context.Context, r GetSandboxRequestObject) (GetSandboxResponseObject, error) {
	v, err := h.manager.Sandboxes.Get(ctx, callerOf(ctx).Namespace, r.SandboxID)
	if err != nil {
		return nil, err
	}
	return GetSandbox200JSONResponse(h.detail(ctx, v)), nil
}

// KillSandbox is DELETE /sandboxes/{sandboxID}.
func (h *handlers) KillSandbox(ctx context.Context, r KillSandboxRequestObject) (KillSandboxResponseObject, error) {
	if err := h.manager.Sandboxes.Kill(ctx, callerOf(ctx).Namespace, r.SandboxID); err != nil {
		return nil, err
	}
	return KillSandbox204Response{}, nil
}

// SetSandboxTimeout is POST /sandboxes/{sandboxID}/timeout.
func (h *handlers) SetSandboxTimeout(ctx context.Context, r SetSandboxTimeoutRequestObject) (SetSandboxTimeoutResponseObject, error) {
	if err := h.manager.Sandboxes.SetTimeout(ctx, callerOf(ctx).Namespace, r.SandboxID, seconds(r.Body.Timeout)); err != nil {
		return nil, err
	}
	return SetSandboxTimeout204Response{}, nil
}

// RefreshSandbox is POST /sandboxes/{sandboxID}/refreshes.
func (h *handlers) RefreshSandbox(ctx context.Context, r RefreshSandboxRequestObject) (RefreshSandboxResponseObject, error) {
	if err := h.manager.Sandboxes.Refresh(ctx, callerOf(ctx).Namespace, r.SandboxID, seconds(deref(deref(r.Body).Duration))); err != nil {
		return nil, err
	}
	return RefreshSandbox204Response{}, nil
}

// PauseSandbox is POST /sandboxes/{sandboxID}/pause.
func (h *handlers) PauseSandbox(ctx context.Context, r PauseSandboxRequestObject) (PauseSandboxResponseObject, error) {
	namespace, memory := callerOf(ctx).Namespace, deref(r.Body).Memory
	err := h.manager.Sandboxes.Pause(ctx, namespace, r.SandboxID, memory)
	if errors.Is(err, errs.ErrConflict) && memory != nil && !*memory {
		return nil, h.staysPaused(ctx, namespace, r.SandboxID, err)
	}
	if err != nil {
		return nil, err
	}
	return PauseSandbox204Response{}, nil
}

// staysPaused adds to an error how to give up the memory of a paused sandbox: not by another pause.
func (h *handlers) staysPaused(ctx context.Context, namespace, id string, refused error) error {
	v, err := h.manager.Sandboxes.Get(ctx, namespace, id)
	if err != nil || v.State != sandboxes.StatePaused {
		return refused
	}
	return errs.Public(refused, fmt.Sprintf("Sandbox %q is already paused, and keeps what it was paused with; "+
		"a connect with memory: false (barchan resume --files-only) gives up memory that it has", id))
}

// ResumeSandbox is POST /sandboxes/{sandboxID}/resume.
func (h *handlers) ResumeSandbox(ctx context.Context, r ResumeSandboxRequestObject) (ResumeSandboxResponseObject, error) {
	timeout, body := defaultTimeoutV1, deref(r.Body)
	if body.Timeout != nil {
		timeout = seconds(*body.Timeout)
	}
	v, err := h.manager.Sandboxes.Resume(ctx, callerOf(ctx).Namespace, r.SandboxID, timeout, body.Memory)
	if err != nil {
		return nil, err
	}
	return ResumeSandbox201JSONResponse(h.sandbox(ctx, v)), nil
}

// UpdateSandboxNetwork is PUT /sandboxes/{sandboxID}/network.
func (h *handlers) UpdateSandboxNetwork(ctx context.Context, r UpdateSandboxNetworkRequestObject) (UpdateSandboxNetworkResponseObject, error) {
	if err := refuseRules("", r.Body.Rules, r.Body.EgressProxy); err != nil {
		return nil, err
	}
	policy := egress(r.Body.AllowInternetAccess, r.Body.AllowOut, r.Body.DenyOut)
	if err := h.manager.Sandboxes.SetNetwork(ctx, callerOf(ctx).Namespace, r.SandboxID, policy); err != nil {
		return nil, err
	}
	return UpdateSandboxNetwork204Response{}, nil
}
