package e2b

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"time"

	buildlog "github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// noBuilds is the response of a server without builds.
type noBuilds struct{}

func (noBuilds) write(w http.ResponseWriter) error {
	writeError(w, http.StatusNotImplemented, "template builds: not available on this server, which has no node of its own that keeps files")
	return nil
}

// VisitRequestTemplateBuildResponse implements the generated interface, as the others do.
func (n noBuilds) VisitRequestTemplateBuildResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitRequestTemplateBuildV2Response implements the generated interface.
func (n noBuilds) VisitRequestTemplateBuildV2Response(w http.ResponseWriter) error { return n.write(w) }

// VisitGetTemplateFilesResponse implements the generated interface.
func (n noBuilds) VisitGetTemplateFilesResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitStartTemplateBuildResponse implements the generated interface.
func (n noBuilds) VisitStartTemplateBuildResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitGetTemplateBuildStatusResponse implements the generated interface.
func (n noBuilds) VisitGetTemplateBuildStatusResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitGetTemplateBuildLogsResponse implements the generated interface.
func (n noBuilds) VisitGetTemplateBuildLogsResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitAssignTemplateTagsResponse implements the generated interface.
func (n noBuilds) VisitAssignTemplateTagsResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitDeleteTemplateTagsResponse implements the generated interface.
func (n noBuilds) VisitDeleteTemplateTagsResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitListTemplateTagsResponse implements the generated interface.
func (n noBuilds) VisitListTemplateTagsResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitCancelTemplateBuildResponse implements the generated interface.
func (n noBuilds) VisitCancelTemplateBuildResponse(w http.ResponseWriter) error { return n.write(w) }

// RequestTemplateBuild is POST /v3/templates.
func (h *handlers) RequestTemplateBuild(ctx context.Context, r RequestTemplateBuildRequestObject) (RequestTemplateBuildResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	out, err := h.requestBuild(ctx, r.Body)
	if err != nil {
		return nil, err
	}
	return RequestTemplateBuild202JSONResponse(out), nil
}

// RequestTemplateBuildV2 is POST /v2/templates.
func (h *handlers) RequestTemplateBuildV2(ctx context.Context, r RequestTemplateBuildV2RequestObject) (RequestTemplateBuildV2ResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	out, err := h.requestBuild(ctx, r.Body)
	if err != nil {
		return nil, err
	}
	return RequestTemplateBuildV2202JSONResponse(out), nil
}

func (h *handlers) requestBuild(ctx context.Context, b *NewTemplateBuild) (RequestedTemplateBuild, error) {
	got, err := h.manager.Builds.Request(ctx, builds.Request{
		Namespace: callerOf(ctx).Namespace, Name: cmp.Or(deref(b.Name), deref(b.Alias)), Tags: b.Tags,
		CPUs: int(deref(b.CPUCount)), MemoryMB: int(deref(b.MemoryMB)), MinFreeMB: int(deref(b.MinFreeDiskMB)),
	})
	if err != nil {
		return RequestedTemplateBuild{}, err
	}
	return RequestedTemplateBuild{
		TemplateID: got.TemplateID, BuildID: got.BuildID, Public: got.Public, Tags: got.Tags,
		Aliases: []string{got.Name}, Names: []string{callerOf(ctx).Namespace + "/" + got.Name},
	}, nil
}

// GetTemplateFiles is GET /templates/{templateID}/files/{hash}.
func (h *handlers) GetTemplateFiles(ctx context.Context, r GetTemplateFilesRequestObject) (GetTemplateFilesResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	who := callerOf(ctx)
	present, path, err := h.manager.Builds.UploadURL(who.Namespace, r.Hash)
	if err != nil {
		return nil, err
	}
	return GetTemplateFiles201JSONResponse{Present: present, URL: new(who.origin + uploadPath + path)}, nil
}

// StartTemplateBuild is POST /v2/templates/{templateID}/builds/{buildID}.
func (h *handlers) StartTemplateBuild(ctx context.Context, r StartTemplateBuildRequestObject) (StartTemplateBuildResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	b := r.Body
	what := builds.Instructions{
		FromImage: deref(b.FromImage), FromTemplate: deref(b.FromTemplate), Registry: registryOf(b.FromImageRegistry),
		StartCommand: deref(b.StartCmd), ReadyCommand: deref(b.ReadyCmd), Force: deref(b.Force), Steps: buildSteps(b.Steps), Secrets: b.Secrets,
	}
	for _, s := range b.Stages {
		what.Stages = append(what.Stages, builds.Stage{Name: s.Name, FromImage: deref(s.FromImage), FromTemplate: deref(s.FromTemplate), Steps: buildSteps(s.Steps)})
	}
	if err := h.manager.Builds.Trigger(ctx, callerOf(ctx).Namespace, r.TemplateID, r.BuildID, what); err != nil {
		return nil, err
	}
	return StartTemplateBuild202Response{}, nil
}

// registryOf returns the credentials of an image's registry; nil if there are none.
func registryOf(wire *ImageRegistry) *builds.Registry {
	if wire == nil {
		return nil
	}
	return &builds.Registry{
		Type: wire.Type, Username: deref(wire.Username), Password: deref(wire.Password), ServiceAccountJSON: deref(wire.ServiceAccountJSON),
	}
}

func buildSteps(wire []TemplateStep) []builds.Step {
	steps := make([]builds.Step, len(wire))
	for i, s := range wire {
		steps[i] = builds.Step{
			Type: s.Type, Args: s.Args, FilesHash: deref(s.FilesHash), From: s.From, Mounts: s.Mounts, Network: deref(s.Network), Force: deref(s.Force),
		}
	}
	return steps
}

// GetTemplateBuildStatus is GET /templates/{templateID}/builds/{buildID}/status.
func (h *handlers) GetTemplateBuildStatus(ctx context.Context, r GetTemplateBuildStatusRequestObject) (GetTemplateBuildStatusResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	limit, err := limitOf(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	if err := checkLogs(nil, r.Params.Level); err != nil {
		return nil, err
	}
	least := slog.LevelDebug
	if r.Params.Level != nil {
		least = levelNamed(*r.Params.Level)
	}
	v, err := h.manager.Builds.Status(ctx, callerOf(ctx).Namespace, r.TemplateID, r.BuildID, builds.StatusRequest{
		Offset: int(deref(r.Params.LogsOffset)), Limit: limit, AtLeast: least,
	})
	if err != nil {
		return nil, err
	}
	out := GetTemplateBuildStatus200JSONResponse{
		TemplateID: v.TemplateID, BuildID: v.BuildID, Status: string(v.State), Logs: []string{}, LogEntries: buildEntries(v.Entries),
	}
	if v.State == builds.StateError {
		out.Reason = &BuildReason{Message: v.Message, Step: optional(v.Step)}
	}
	return out, nil
}

// GetTemplateBuildLogs is GET /templates/{templateID}/builds/{buildID}/logs.
func (h *handlers) GetTemplateBuildLogs(ctx context.Context, r GetTemplateBuildLogsRequestObject) (GetTemplateBuildLogsResponseObject, error) {
	if h.manager.Builds == nil {
		return noBuilds{}, nil
	}
	p := r.Params
	limit, err := limitOf(p.Limit)
	if err != nil {
		return nil, err
	}
	if err := checkLogs(p.Direction, p.Level); err != nil {
		return nil, err
	}
	entries, err := h.manager.Builds.Entries(ctx, callerOf(ctx).Namespace, r.TemplateID, r.BuildID, builds.LogRequest{
		From: instant(p.Cursor, time.Millisecond), Backward: deref(p.Direction) == Backward, Limit: limit, AtLeast: levelNamed(deref(p.Level)),
	})
	if err != nil {
		return nil, err
	}
	return GetTemplateBuildLogs200JSONResponse{Logs: buildEntries(entries)}, nil
}

func buildEntries(entries []buildlog.Entry) []BuildLogEntry {
	out := make([]BuildLogEntry, len(entries))
	for i, e := range entries {
		out[i] = BuildLogEntry{Timestamp: e.Timestamp.UTC(), Level: levelOf(builds.Severity(e.Level)), Message: e.Message, Step: optional(e.Step)}
	}
	return out
}

// templateBuilds shows the builds of a template.
func templateBuilds(t templates.Template, list []builds.Build) []TemplateBuild {
	out := make([]TemplateBuild, len(list))
	for i, b := range list {
		out[i] = TemplateBuild{
			BuildID: b.ID, Status: string(b.State), EnvdVersion: envd.Version, CreatedAt: b.CreatedAt, UpdatedAt: b.UpdatedAt, FinishedAt: b.EndedAt,
			CPUCount: int32(cmp.Or(b.CPUs, t.Size.CPUs)), MemoryMB: cmp.Or(b.MemoryMB, t.Size.MemoryMB), DiskSizeMB: t.Size.DiskMB,
		}
	}
	return out
}
