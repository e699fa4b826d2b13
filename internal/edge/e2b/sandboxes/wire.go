package sandboxes

import (
	"context"
	"encoding/json"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// clientID is a required field without a meaning.
const clientID = "barchan"

func (h *Handlers) sandbox(ctx context.Context, v sandboxes.Sandbox) api.Sandbox {
	return api.Sandbox{
		SandboxID:          string(v.ID),
		TemplateID:         v.TemplateID,
		Alias:              request.Optional(v.TemplateName),
		ClientID:           clientID,
		EnvdVersion:        envd.Version,
		EnvdAccessToken:    request.Optional(v.AgentToken),
		TrafficAccessToken: request.Optional(v.TrafficToken),
		Domain:             request.Optional(request.CallerOf(ctx).Domain),
	}
}

func (h *Handlers) listed(ctx context.Context, v sandboxes.Sandbox) api.ListedSandbox {
	return api.ListedSandbox{
		VolumeMounts: h.volumeMounts(ctx, v),
		SandboxID:    string(v.ID),
		Name:         request.Optional(v.Name),
		TemplateID:   v.TemplateID,
		Alias:        request.Optional(v.TemplateName),
		ClientID:     clientID,
		StartedAt:    v.StartedAt,
		EndAt:        v.EndAt,
		CPUCount:     int32(v.Size.CPUs),
		MemoryMB:     v.Size.MemoryMB,
		DiskSizeMB:   v.Size.DiskMB,
		State:        api.SandboxState(v.State),
		EnvdVersion:  envd.Version,
		Metadata:     stringMap(v.Metadata),
	}
}

func (h *Handlers) detail(ctx context.Context, v sandboxes.Sandbox) api.SandboxDetail {
	l := h.listed(ctx, v)
	d := api.SandboxDetail{
		SandboxID: l.SandboxID, Name: l.Name, TemplateID: l.TemplateID, Alias: l.Alias, ClientID: l.ClientID,
		StartedAt: l.StartedAt, EndAt: l.EndAt, CPUCount: l.CPUCount, MemoryMB: l.MemoryMB, DiskSizeMB: l.DiskSizeMB,
		State: l.State, EnvdVersion: l.EnvdVersion, Metadata: l.Metadata, VolumeMounts: l.VolumeMounts,
		Domain:  request.Optional(request.CallerOf(ctx).Domain),
		Network: network(v),
		Memory:  request.Optional(string(v.Memory)),

		CreatedByKey: request.Optional(v.CreatedByKey),
	}
	if v.MemorySize > 0 {
		d.MemoryBytes = &v.MemorySize
	}
	if len(v.Containers) > 0 {
		d.Containers = new(containersOf(v))
	}
	if len(v.Operations) > 0 {
		d.Operations = new(operationsOf(v))
	}
	if !request.CallerOf(ctx).ReadOnly {
		d.EnvdAccessToken = request.Optional(v.AgentToken)
	}
	if v.Network != nil {
		d.AllowInternetAccess = v.Network.Internet
	}
	d.Lifecycle.AutoResume = v.AutoResume
	d.Lifecycle.OnTimeout = api.OnTimeoutKill
	if v.OnTimeout == agents.TimeoutPause {
		d.Lifecycle.OnTimeout = api.OnTimeoutPause
	}
	return d
}

func containersOf(v sandboxes.Sandbox) []api.SandboxContainer {
	all := make([]api.SandboxContainer, len(v.Containers))
	for i := range v.Containers {
		c := &v.Containers[i]
		all[i] = api.SandboxContainer{Name: c.Name, State: c.Reason(), Ready: c.Ready, RestartCount: c.RestartCount}
	}
	return all
}

func operationsOf(v sandboxes.Sandbox) []api.SandboxOperation {
	all := make([]api.SandboxOperation, len(v.Operations))
	for i, op := range v.Operations {
		steps := make([]api.SandboxStep, len(op.Steps))
		for k, s := range op.Steps {
			steps[k] = api.SandboxStep{Name: s.Name, After: s.After, Milliseconds: s.Milliseconds}
		}
		all[i] = api.SandboxOperation{Operation: string(op.Operation), StartedAt: op.StartedAt.UTC(), Milliseconds: op.Milliseconds, Steps: steps}
	}
	return all
}

// network is nil for a sandbox without network settings.
func network(v sandboxes.Sandbox) *api.Network {
	if v.Network == nil && v.PublicTraffic && v.MaskRequestHost == "" {
		return nil
	}
	n := &api.Network{AllowPublicTraffic: &v.PublicTraffic, MaskRequestHost: request.Optional(v.MaskRequestHost)}
	if v.Network != nil {
		n.AllowOut, n.DenyOut = v.Network.AllowOut, v.Network.DenyOut
	}
	return n
}

// egress is nil if a request does not set it.
func egress(internet *bool, allowOut, denyOut []string) *agents.EgressPolicy {
	if internet == nil && len(allowOut) == 0 && len(denyOut) == 0 {
		return nil
	}
	yes := true
	if internet == nil {
		internet = &yes
	}
	return &agents.EgressPolicy{Internet: internet, AllowOut: allowOut, DenyOut: denyOut}
}

func stringMap(m map[string]string) *api.StringMap {
	if len(m) == 0 {
		return nil
	}
	return new(api.StringMap(m))
}

func metric(m envd.Metrics) api.SandboxMetric {
	return api.SandboxMetric{
		Timestamp:     time.Unix(m.Timestamp, 0).UTC(),
		TimestampUnix: m.Timestamp,
		CPUCount:      int32(m.CPUCount),
		CPUUsedPct:    m.CPUUsedPct,
		MemUsed:       m.MemUsed,
		MemTotal:      m.MemTotal,
		MemCache:      m.MemCache,
		DiskUsed:      m.DiskUsed,
		DiskTotal:     m.DiskTotal,
	}
}

func logEntry(l envd.LogLine) api.SandboxLogEntry {
	return api.SandboxLogEntry{
		Timestamp: l.Timestamp.UTC(),
		Level:     request.LevelOf(l.Severity()),
		Message:   l.Line,
		Fields:    api.StringMap{"source": l.Source, "stream": l.Stream},
	}
}

// logLine returns an entry as a JSON object, for E2B's first route for logs: its CLI reads level and
// logger.
func logLine(e api.SandboxLogEntry) string {
	text, _ := json.Marshal(map[string]string{ // strings cannot fail
		"level": string(e.Level), "logger": e.Fields["source"], "message": e.Message, "stream": e.Fields["stream"],
	})
	return string(text)
}

// volumeMounts names the volumes that a sandbox mounts.
func (h *Handlers) volumeMounts(ctx context.Context, v sandboxes.Sandbox) *[]api.VolumeMount {
	if len(v.VolumeMounts) == 0 {
		return nil
	}
	out := make([]api.VolumeMount, len(v.VolumeMounts))
	for i, m := range v.VolumeMounts {
		out[i] = api.VolumeMount{Name: m.Volume, Path: m.Path}
		if h.Manager.Volumes != nil {
			out[i].Name = h.Manager.Volumes.NameOf(ctx, v.Namespace, m.Volume)
		}
	}
	return &out
}
