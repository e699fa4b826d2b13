package templates

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	buildlog "github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// noBuilds is the error of a server without builds.
func noBuilds() error {
	return request.Unavailable("template builds: not available on a Kubernetes cluster, where no layers of files are kept; apply a SandboxTemplate with an image")
}

// RequestTemplateBuild is POST /v3/templates.
func (h *Handlers) RequestTemplateBuild(ctx context.Context, r api.RequestTemplateBuildRequestObject) (api.RequestTemplateBuildResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	out, err := h.requestBuild(ctx, r.Body)
	if err != nil {
		return nil, err
	}
	return api.RequestTemplateBuild202JSONResponse(out), nil
}

// RequestTemplateBuildV2 is POST /v2/templates.
func (h *Handlers) RequestTemplateBuildV2(ctx context.Context, r api.RequestTemplateBuildV2RequestObject) (api.RequestTemplateBuildV2ResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	out, err := h.requestBuild(ctx, r.Body)
	if err != nil {
		return nil, err
	}
	return api.RequestTemplateBuildV2202JSONResponse(out), nil
}

func (h *Handlers) requestBuild(ctx context.Context, b *api.NewTemplateBuild) (api.RequestedTemplateBuild, error) {
	got, err := h.Manager.Builds.Request(ctx, builds.Request{
		Namespace: request.CallerOf(ctx).Namespace, Name: cmp.Or(request.Deref(b.Name), request.Deref(b.Alias)), Tags: b.Tags,
		CPUs: int(request.Deref(b.CPUCount)), MemoryMB: int(request.Deref(b.MemoryMB)), MinFreeMB: int(request.Deref(b.MinFreeDiskMB)),
	})
	if err != nil {
		return api.RequestedTemplateBuild{}, err
	}
	return api.RequestedTemplateBuild{
		TemplateID: got.TemplateID, BuildID: got.BuildID, Public: got.Public, Tags: got.Tags,
		Aliases: []string{got.Name}, Names: []string{request.CallerOf(ctx).Namespace + "/" + got.Name},
	}, nil
}

// GetTemplateFiles is GET /templates/{templateID}/files/{hash}.
func (h *Handlers) GetTemplateFiles(ctx context.Context, r api.GetTemplateFilesRequestObject) (api.GetTemplateFilesResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	who := request.CallerOf(ctx)
	present, path, err := h.Manager.Builds.UploadURL(who.Namespace, r.Hash)
	if err != nil {
		return nil, err
	}
	return api.GetTemplateFiles201JSONResponse{Present: present, URL: new(who.Origin + UploadPath + path)}, nil
}

// StartTemplateBuild is POST /v2/templates/{templateID}/builds/{buildID}.
func (h *Handlers) StartTemplateBuild(ctx context.Context, r api.StartTemplateBuildRequestObject) (api.StartTemplateBuildResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	b := r.Body
	what := builds.Instructions{
		FromImage: request.Deref(b.FromImage), FromTemplate: request.Deref(b.FromTemplate), Registry: registryOf(b.FromImageRegistry),
		StartCommand: request.Deref(b.StartCmd), ReadyCommand: request.Deref(b.ReadyCmd), Force: request.Deref(b.Force), Steps: buildSteps(b.Steps), Secrets: b.Secrets,
	}
	for _, s := range b.Stages {
		what.Stages = append(what.Stages, builds.Stage{
			Name: s.Name, FromImage: request.Deref(s.FromImage), FromTemplate: request.Deref(s.FromTemplate), Registry: registryOf(s.FromImageRegistry), Steps: buildSteps(s.Steps),
		})
	}
	if err := h.Manager.Builds.Trigger(ctx, request.CallerOf(ctx).Namespace, r.TemplateID, r.BuildID, what); err != nil {
		return nil, err
	}
	return api.StartTemplateBuild202Response{}, nil
}

// registryOf returns the credentials of an image's registry; nil if there are none.
func registryOf(wire *api.ImageRegistry) *builds.Registry {
	if wire == nil {
		return nil
	}
	return &builds.Registry{
		Type: wire.Type, Username: request.Deref(wire.Username), Password: request.Deref(wire.Password), ServiceAccountJSON: request.Deref(wire.ServiceAccountJSON),
		AccessKeyID: request.Deref(wire.AwsAccessKeyID), SecretAccessKey: request.Deref(wire.AwsSecretAccessKey), Region: request.Deref(wire.AwsRegion),
	}
}

func buildSteps(wire []api.TemplateStep) []builds.Step {
	steps := make([]builds.Step, len(wire))
	for i, s := range wire {
		steps[i] = builds.Step{
			Type: s.Type, Args: s.Args, FilesHash: request.Deref(s.FilesHash), From: s.From, Mounts: s.Mounts, Network: request.Deref(s.Network), Force: request.Deref(s.Force),
		}
	}
	return steps
}

// GetTemplateBuildStatus is GET /templates/{templateID}/builds/{buildID}/status.
func (h *Handlers) GetTemplateBuildStatus(ctx context.Context, r api.GetTemplateBuildStatusRequestObject) (api.GetTemplateBuildStatusResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	limit, err := request.Limit(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	if err := request.CheckLogs(nil, r.Params.Level); err != nil {
		return nil, err
	}
	least := slog.LevelDebug
	if r.Params.Level != nil {
		least = request.LevelNamed(*r.Params.Level)
	}
	v, err := h.Manager.Builds.Status(ctx, request.CallerOf(ctx).Namespace, r.TemplateID, r.BuildID, builds.StatusRequest{
		Offset: int(request.Deref(r.Params.LogsOffset)), Limit: limit, AtLeast: least,
	})
	if err != nil {
		return nil, err
	}
	out := api.GetTemplateBuildStatus200JSONResponse{
		TemplateID: v.TemplateID, BuildID: v.BuildID, Status: string(v.State), Logs: []string{}, LogEntries: buildEntries(v.Entries),
	}
	if v.State == builds.StateError {
		out.Reason = &api.BuildReason{Message: v.Message, Step: request.Optional(v.Step)}
	}
	return out, nil
}

// GetTemplateBuildLogs is GET /templates/{templateID}/builds/{buildID}/logs.
func (h *Handlers) GetTemplateBuildLogs(ctx context.Context, r api.GetTemplateBuildLogsRequestObject) (api.GetTemplateBuildLogsResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	p := r.Params
	limit, err := request.Limit(p.Limit)
	if err != nil {
		return nil, err
	}
	if err := request.CheckLogs(p.Direction, p.Level); err != nil {
		return nil, err
	}
	entries, err := h.Manager.Builds.Entries(ctx, request.CallerOf(ctx).Namespace, r.TemplateID, r.BuildID, builds.LogRequest{
		From: request.Instant(p.Cursor, time.Millisecond), Backward: request.Deref(p.Direction) == api.Backward, Limit: limit, AtLeast: request.LevelNamed(request.Deref(p.Level)),
	})
	if err != nil {
		return nil, err
	}
	return api.GetTemplateBuildLogs200JSONResponse{Logs: buildEntries(entries)}, nil
}

func buildEntries(entries []buildlog.Entry) []api.BuildLogEntry {
	out := make([]api.BuildLogEntry, len(entries))
	for i, e := range entries {
		out[i] = api.BuildLogEntry{Timestamp: e.Timestamp.UTC(), Level: request.LevelOf(builds.Severity(e.Level)), Message: e.Message, Step: request.Optional(e.Step)}
	}
	return out
}

// templateBuilds shows the builds of a template.
func templateBuilds(t templates.Template, list []builds.Build) []api.TemplateBuild {
	out := make([]api.TemplateBuild, len(list))
	for i, b := range list {
		out[i] = api.TemplateBuild{
			BuildID: b.ID, Status: string(b.State), EnvdVersion: envd.Version, CreatedAt: b.CreatedAt, UpdatedAt: b.UpdatedAt, FinishedAt: b.EndedAt,
			CPUCount: int32(cmp.Or(b.CPUs, t.Size.CPUs)), MemoryMB: cmp.Or(b.MemoryMB, t.Size.MemoryMB), DiskSizeMB: t.Size.DiskMB,
		}
	}
	return out
}

// CancelTemplateBuild is DELETE /templates/{templateID}/builds/{buildID}.
func (h *Handlers) CancelTemplateBuild(ctx context.Context, r api.CancelTemplateBuildRequestObject) (api.CancelTemplateBuildResponseObject, error) {
	if h.Manager.Builds == nil {
		return nil, noBuilds()
	}
	if err := h.Manager.Builds.Cancel(ctx, request.CallerOf(ctx).Namespace, r.TemplateID, r.BuildID); err != nil {
		return nil, err
	}
	return api.CancelTemplateBuild204Response{}, nil
}
