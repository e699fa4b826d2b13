package sandboxes

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"time"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// CreateSnapshot is POST /sandboxes/{sandboxID}/snapshots.
func (h *Handlers) CreateSnapshot(ctx context.Context, r api.CreateSnapshotRequestObject) (api.CreateSnapshotResponseObject, error) {
	body := request.Deref(r.Body)
	req := snapshots.Request{
		Namespace: request.CallerOf(ctx).Namespace, ID: r.SandboxID, Name: request.Deref(body.Name), FilesOnly: body.Memory != nil && !*body.Memory,
	}
	if body.TTL != nil {
		if req.TTL = request.Seconds(*body.TTL); req.TTL == 0 { // the manager takes this for none
			return nil, request.Invalid("ttl: must be 1 or more")
		}
	}
	v, err := h.Manager.Snapshots.Create(ctx, req)
	if err != nil {
		return nil, err
	}
	return api.CreateSnapshot201JSONResponse(snapshot(&v)), nil
}

// ListSnapshots is GET /snapshots.
func (h *Handlers) ListSnapshots(ctx context.Context, r api.ListSnapshotsRequestObject) (api.ListSnapshotsResponseObject, error) {
	limit, err := request.Limit(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	page, next, err := h.Manager.Snapshots.List(ctx, snapshots.ListRequest{
		Namespace: request.CallerOf(ctx).Namespace, SandboxID: request.Deref(r.Params.SandboxID), Name: request.Deref(r.Params.Name),
		Limit: limit, Cursor: request.Deref(r.Params.NextToken),
	})
	if err != nil {
		return nil, err
	}
	out := snapshotPage{items: make([]api.Snapshot, len(page)), next: next}
	for i := range page {
		out.items[i] = snapshot(&page[i])
	}
	return out, nil
}

type snapshotPage struct {
	items []api.Snapshot
	next  string
}

// VisitListSnapshotsResponse implements the generated interface.
func (p snapshotPage) VisitListSnapshotsResponse(w http.ResponseWriter) error {
	return request.WritePage(w, p.items, p.next)
}

func snapshot(v *snapshots.Snapshot) api.Snapshot {
	s := api.Snapshot{
		SnapshotID: v.ID, Names: v.Names, SandboxID: string(v.SandboxID), TemplateID: cmp.Or(v.TemplateID, v.TemplateName), CreatedAt: v.CreatedAt,
		SizeBytes: v.Size, MemoryBytes: v.MemorySize, Memory: v.Content == barchan.ContentMemoryAndFiles, Secrets: v.Secrets,
	}
	if !v.ExpiresAt.IsZero() {
		s.ExpiresAt = &v.ExpiresAt
	}
	return s
}

// defaultForkTimeout is the default of the wire format.
const defaultForkTimeout = 15 * time.Second

// ForkSandbox is POST /sandboxes/{sandboxID}/fork.
func (h *Handlers) ForkSandbox(ctx context.Context, r api.ForkSandboxRequestObject) (api.ForkSandboxResponseObject, error) {
	body, who := request.Deref(r.Body), request.CallerOf(ctx)
	req := creating.ForkRequest{
		Namespace: who.Namespace, Key: who.Key, ID: r.SandboxID, Count: 1, Timeout: defaultForkTimeout,
		AllowSecrets: request.Deref(body.AllowSecrets), Metadata: request.Deref(body.Metadata), Env: request.Deref(body.EnvVars),
	}
	if body.Count != nil {
		req.Count = int(*body.Count)
	}
	if body.Timeout != nil {
		req.Timeout = request.Seconds(*body.Timeout)
	}
	if r.Params.Stream != nil && *r.Params.Stream {
		return forkStream(func(w http.ResponseWriter) error { return h.streamForks(ctx, w, req) }), nil
	}
	forks, err := h.Manager.Creates.Fork(ctx, req)
	if err != nil {
		return nil, err
	}
	out := make(api.ForkSandbox201JSONResponse, len(forks))
	for i, one := range forks {
		out[i] = h.forkResult(ctx, r.SandboxID, one)
	}
	return out, nil
}

func (h *Handlers) forkResult(ctx context.Context, source string, one creating.Forked) api.ForkResult {
	if one.Err == nil {
		request.Made(ctx, string(one.Sandbox.ID))
		return api.ForkResult{Sandbox: new(h.sandbox(ctx, one.Sandbox))}
	}
	status, text := request.AnswerTo(one.Err)
	h.Log.DebugContext(ctx, "fork failed", telemetry.Sandbox, source, telemetry.Status, status, telemetry.Error, one.Err)
	return api.ForkResult{Error: &api.Error{Code: int32(status), Message: text}}
}

// forkStream writes a line for each fork. Its error means that nothing was written.
type forkStream func(w http.ResponseWriter) error

// VisitForkSandboxResponse implements the generated interface.
func (f forkStream) VisitForkSandboxResponse(w http.ResponseWriter) error { return f(w) }

// ForkLine is a line of such a response.
type ForkLine struct {
	// Index is the fork's index among the requested ones, from 0.
	Index int `json:"index"`
	api.ForkResult
}

// streamForks writes each fork at once. If the client disconnects, ctx ends the pending ones.
func (h *Handlers) streamForks(ctx context.Context, w http.ResponseWriter, req creating.ForkRequest) error {
	control, lines, begun := http.NewResponseController(w), json.NewEncoder(w), false
	return h.Manager.Creates.ForkEach(ctx, req, func(n int, one creating.Forked) {
		if !begun {
			w.Header().Set("Content-Type", "application/x-ndjson")
			w.WriteHeader(http.StatusCreated)
			begun = true
		}
		if lines.Encode(ForkLine{n, h.forkResult(ctx, req.ID, one)}) == nil {
			_ = control.Flush()
		}
	})
}
