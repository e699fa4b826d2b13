package e2b

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/control/manager/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// clientID is a required field without a meaning.
const clientID = "barchan"

func (s *Server) sandbox(ctx context.Context, v sandboxes.Sandbox) Sandbox {
	return Sandbox{
		SandboxID:          string(v.ID),
		TemplateID:         v.TemplateID,
		Alias:              optional(v.TemplateName),
		ClientID:           clientID,
		EnvdVersion:        envd.Version,
		EnvdAccessToken:    optional(v.AgentToken),
		TrafficAccessToken: optional(v.TrafficToken),
		Domain:             optional(callerOf(ctx).domain),
	}
}

func (s *Server) listed(ctx context.Context, v sandboxes.Sandbox) ListedSandbox {
	return ListedSandbox{
		VolumeMounts: s.volumeMounts(ctx, v),
		SandboxID:    string(v.ID),
		Name:         optional(v.Name),
		TemplateID:   v.TemplateID,
		Alias:        optional(v.TemplateName),
		ClientID:     clientID,
		StartedAt:    v.StartedAt,
		EndAt:        v.EndAt,
		CPUCount:     int32(v.Size.CPUs),
		MemoryMB:     v.Size.MemoryMB,
		DiskSizeMB:   v.Size.DiskMB,
		State:        SandboxState(v.State),
		EnvdVersion:  envd.Version,
		Metadata:     stringMap(v.Metadata),
	}
}

func (s *Server) detail(ctx context.Context, v sandboxes.Sandbox) SandboxDetail {
	l := s.listed(ctx, v)
	d := SandboxDetail{
		SandboxID: l.SandboxID, Name: l.Name, TemplateID: l.TemplateID, Alias: l.Alias, ClientID: l.ClientID,
		StartedAt: l.StartedAt, EndAt: l.EndAt, CPUCount: l.CPUCount, MemoryMB: l.MemoryMB, DiskSizeMB: l.DiskSizeMB,
		State: l.State, EnvdVersion: l.EnvdVersion, Metadata: l.Metadata, VolumeMounts: l.VolumeMounts,
		Domain:  optional(callerOf(ctx).domain),
		Network: network(v),
		Memory:  optional(string(v.Memory)),
	}
	if !callerOf(ctx).readOnly {
		d.EnvdAccessToken = optional(v.AgentToken)
	}
	if v.Network != nil {
		d.AllowInternetAccess = v.Network.Internet
	}
	d.Lifecycle.AutoResume = v.AutoResume
	d.Lifecycle.OnTimeout = OnTimeoutKill
	if v.OnTimeout == agents.TimeoutPause {
		d.Lifecycle.OnTimeout = OnTimeoutPause
	}
	return d
}

// network is nil for a sandbox without network settings.
func network(v sandboxes.Sandbox) *Network {
	if v.Network == nil && v.PublicTraffic && v.MaskRequestHost == "" {
		return nil
	}
	n := &Network{AllowPublicTraffic: &v.PublicTraffic, MaskRequestHost: optional(v.MaskRequestHost)}
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

func stringMap(m map[string]string) *StringMap {
	if len(m) == 0 {
		return nil
	}
	return new(StringMap(m))
}

func metric(m envd.Metrics) SandboxMetric {
	return SandboxMetric{
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

func logEntry(l envd.LogLine) SandboxLogEntry {
	return SandboxLogEntry{
		Timestamp: l.Timestamp.UTC(),
		Level:     levelOf(l.Severity()),
		Message:   l.Line,
		Fields:    StringMap{"source": l.Source, "stream": l.Stream},
	}
}

// logLine returns an entry as a JSON object, for E2B's first route for logs: its CLI reads level and
// logger.
func logLine(e SandboxLogEntry) string {
	text, _ := json.Marshal(map[string]string{ // strings cannot fail
		"level": string(e.Level), "logger": e.Fields["source"], "message": e.Message, "stream": e.Fields["stream"],
	})
	return string(text)
}

// levelOf returns the name of a level.
func levelOf(level slog.Level) LogLevel {
	switch {
	case level >= slog.LevelError:
		return LevelError
	case level >= slog.LevelWarn:
		return LevelWarn
	case level >= slog.LevelInfo:
		return LevelInfo
	}
	return LevelDebug
}

// levelNamed returns the level of a name that levelOf returns; info for none.
func levelNamed(name LogLevel) slog.Level {
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelWarn, slog.LevelError} {
		if levelOf(level) == name {
			return level
		}
	}
	return slog.LevelInfo
}

func template(t templates.Template) Template {
	return Template{
		TemplateID: t.ID, BuildID: buildOf(t), BuildStatus: buildReady, BuildCount: 1,
		CPUCount: int32(t.Size.CPUs), MemoryMB: t.Size.MemoryMB, DiskSizeMB: t.Size.DiskMB,
		Public: t.Public, Aliases: t.Aliases, Names: templateNames(t), Tags: tagNames(t),
		CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt, EnvdVersion: envd.Version,
	}
}

func templateWithBuilds(t templates.Template) TemplateWithBuilds {
	return TemplateWithBuilds{
		TemplateID: t.ID, Public: t.Public, Aliases: t.Aliases, Names: templateNames(t), Tags: templateTags(t.Tags),
		CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt,
		Builds: []TemplateBuild{{
			BuildID: buildOf(t), Status: buildReady, EnvdVersion: envd.Version,
			CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt, FinishedAt: &t.UpdatedAt,
			CPUCount: int32(t.Size.CPUs), MemoryMB: t.Size.MemoryMB, DiskSizeMB: t.Size.DiskMB,
		}},
	}
}

func tagNames(t templates.Template) []string {
	names := make([]string, len(t.Tags))
	for i, tag := range t.Tags {
		names[i] = tag.Name
	}
	return names
}

func templateNames(t templates.Template) []string {
	names := make([]string, len(t.Aliases))
	for i, alias := range t.Aliases {
		names[i] = t.Namespace + "/" + alias
	}
	return names
}

// buildOf returns the ID of the build that last made a template; one that no build made counts as a build itself.
func buildOf(t templates.Template) string { return cmp.Or(t.Build, string(t.UID)) }

// buildReady is the state of every listed template.
const buildReady = string(builds.StateReady)

func keyMask(k apikeys.Key) KeyMask {
	shown := ""
	if len(k.Prefix) > len(barchan.KeyPrefix) {
		shown = k.Prefix[len(barchan.KeyPrefix):]
	}
	return KeyMask{Prefix: barchan.KeyPrefix, ValueLength: barchan.KeyDigits, MaskedValuePrefix: shown}
}
