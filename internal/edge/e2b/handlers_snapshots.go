package e2b

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
)

// CreateSnapshot is POST /sandboxes/{sandboxID}/snapshots.
func (h *handlers) CreateSnapshot(ctx context.Context, r CreateSnapshotRequestObject) (CreateSnapshotResponseObject, error) {
	body := deref(r.Body)
	req := snapshots.Request{
		Namespace: callerOf(ctx).Namespace, ID: r.SandboxID, Name: deref(body.Name), FilesOnly: body.Memory != nil && !*body.Memory,
	}
	if body.TTL != nil {
		if req.TTL = seconds(*body.TTL); req.TTL == 0 { // the manager takes this for none
			return nil, invalid("ttl: must be 1 or more")
		}
	}
	v, err := h.manager.Snapshots.Create(ctx, req)
	if err != nil {
		return nil, err
	}
	return CreateSnapshot201JSONResponse(snapshot(&v)), nil
}

// ListSnapshots is GET /snapshots.
func (h *handlers) ListSnapshots(ctx context.Context, r ListSnapshotsRequestObject) (ListSnapshotsResponseObject, error) {
	limit, err := limitOf(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	page, next, err := h.manager.Snapshots.List(ctx, snapshots.ListRequest{
		Namespace: callerOf(ctx).Namespace, SandboxID: deref(r.Params.SandboxID), Name: deref(r.Params.Name),
		Limit: limit, Cursor: deref(r.Params.NextToken),
	})
	if err != nil {
		return nil, err
	}
	out := snapshotPage{items: make([]Snapshot, len(page)), next: next}
	for i := range page {
		out.items[i] = snapshot(&page[i])
	}
	return out, nil
}

type snapshotPage struct {
	items []Snapshot
	next  string
}

// VisitListSnapshotsResponse implements the generated interface.
func (p snapshotPage) VisitListSnapshotsResponse(w http.ResponseWriter) error {
	return writePage(w, p.items, p.next)
}

func snapshot(v *snapshots.Snapshot) Snapshot {
	s := Snapshot{
		SnapshotID: v.ID, Names: v.Names, SandboxID: string(v.SandboxID), TemplateID: cmp.Or(v.TemplateID, v.TemplateName), CreatedAt: v.CreatedAt,
		SizeBytes: v.Size, MemoryBytes: v.MemorySize, Memory: v.Content == barchan.ContentMemoryAndFiles, Secrets: v.Secrets,
	}
	if !v.ExpiresAt.IsZero() {
		s.ExpiresAt = &v.ExpiresAt
	}
	return s
}

// DeleteTemplate is DELETE /templates/{templateID}, which deletes snapshots, and templates that builds made.
func (h *handlers) DeleteTemplate(ctx context.Context, r DeleteTemplateRequestObject) (DeleteTemplateResponseObject, error) {
	_, noTemplate := h.manager.Templates.Get(ctx, callerOf(ctx).Namespace, r.TemplateID)
	if noTemplate == nil && h.manager.Builds == nil {
		return noDeletion{}, nil
	}
	if noTemplate == nil {
		if err := h.manager.Builds.Delete(ctx, callerOf(ctx).Namespace, r.TemplateID); err != nil {
			return nil, err
		}
		return DeleteTemplate204Response{}, nil
	}
	if !errors.Is(noTemplate, errs.ErrNotFound) {
		return nil, noTemplate
	}
	err := h.manager.Snapshots.Delete(ctx, callerOf(ctx).Namespace, r.TemplateID)
	if errors.Is(err, errs.ErrNotFound) && !strings.Contains(r.TemplateID, ":") { // a snapshot's ID has a tag
		err = noTemplate
	}
	if err != nil {
		return nil, err
	}
	return DeleteTemplate204Response{}, nil
}

// noDeletion is the response for a template where there are no builds: only the operator deletes those.
type noDeletion struct{}

// VisitDeleteTemplateResponse implements the generated interface.
func (noDeletion) VisitDeleteTemplateResponse(w http.ResponseWriter) error {
	writeError(w, http.StatusNotImplemented, "deleting templates: not available on this server; a snapshot of the same name is deleted by its ID, <name>:<tag>")
	return nil
}

// defaultForkTimeout is the default of the wire format.
const defaultForkTimeout = 15 * time.Second

// ForkSandbox is POST /sandboxes/{sandboxID}/fork.
func (h *handlers) ForkSandbox(ctx context.Context, r ForkSandboxRequestObject) (ForkSandboxResponseObject, error) {
	body := deref(r.Body)
	req := creating.ForkRequest{
		Namespace: callerOf(ctx).Namespace, ID: r.SandboxID, Count: 1, Timeout: defaultForkTimeout,
		AllowSecrets: deref(body.AllowSecrets), Metadata: deref(body.Metadata), Env: deref(body.EnvVars),
	}
	if body.Count != nil {
		req.Count = int(*body.Count)
	}
	if body.Timeout != nil {
		req.Timeout = seconds(*body.Timeout)
	}
	if r.Params.Stream != nil && *r.Params.Stream {
		return forkStream(func(w http.ResponseWriter) error { return h.streamForks(ctx, w, req) }), nil
	}
	forks, err := h.manager.Creates.Fork(ctx, req)
	if err != nil {
		return nil, err
	}
	out := make(ForkSandbox201JSONResponse, len(forks))
	for i, one := range forks {
		out[i] = h.forkResult(ctx, r.SandboxID, one)
	}
	return out, nil
}

func (h *handlers) forkResult(ctx context.Context, source string, one creating.Forked) ForkResult {
	if one.Err == nil {
		return ForkResult{Sandbox: new(h.sandbox(ctx, one.Sandbox))}
	}
	a := answerTo(one.Err)
	h.log.DebugContext(ctx, "fork failed", telemetry.Sandbox, source, telemetry.Status, a.status, telemetry.Error, one.Err)
	return ForkResult{Error: &Error{Code: int32(a.status), Message: a.text}}
}

// forkStream writes a line for each fork. Its error means that nothing was written.
type forkStream func(w http.ResponseWriter) error

// VisitForkSandboxResponse implements the generated interface.
func (f forkStream) VisitForkSandboxResponse(w http.ResponseWriter) error { return f(w) }

// forkLine is a line of such a response.
type forkLine struct {
	// Index is the fork's index among the requested ones, from 0.
	Index int `json:"index"`
	ForkResult
}

// streamForks writes each fork at once. If the client disconnects, ctx ends the pending ones.
func (h *handlers) streamForks(ctx context.Context, w http.ResponseWriter, req creating.ForkRequest) error {
	control, lines, begun := http.NewResponseController(w), json.NewEncoder(w), false
	return h.manager.Creates.ForkEach(ctx, req, func(n int, one creating.Forked) {
		if !begun {
			w.Header().Set("Content-Type", "application/x-ndjson")
			w.WriteHeader(http.StatusCreated)
			begun = true
		}
		if lines.Encode(forkLine{n, h.forkResult(ctx, req.ID, one)}) == nil {
			_ = control.Flush()
		}
	})
}
