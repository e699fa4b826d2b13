package gateway

import (
	"context"
	"log/slog"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// accessRecord is the access log's record of a request.
type accessRecord struct {
	sandbox                           sandbox.ID
	port                              uint16
	method, host, path, proto, remote string
	status                            int
	bytes, received                   int64 // of the bodies
	firstByte                         time.Duration
	started                           time.Time
	woken                             bool
	reason, trace, agent              string
}

// logged returns the level of the access log, and whether it is enabled.
func (g *Gateway) logged(ctx context.Context) (slog.Level, bool) {
	level := slog.LevelDebug
	if g.cfg.AccessLog != nil {
		level = slog.LevelInfo
	}
	return level, g.access.Enabled(ctx, level)
}

func (g *Gateway) logRequest(ctx context.Context, level slog.Level, a *accessRecord) {
	g.access.LogAttrs(ctx, level, "request",
		slog.String(telemetry.Sandbox, string(a.sandbox)), slog.Int(telemetry.Port, int(a.port)),
		slog.String(telemetry.Method, a.method), slog.String("host", a.host), slog.String(telemetry.Path, a.path),
		slog.String("proto", a.proto), slog.String("remote", a.remote),
		slog.Int(telemetry.Status, a.status), slog.Int64("bytes", a.bytes), slog.Int64("received", a.received),
		slog.Duration("first_byte", a.firstByte), slog.Duration(telemetry.Duration, time.Since(a.started)),
		slog.Bool("woken", a.woken), slog.String(telemetry.Reason, a.reason), slog.String("trace", a.trace),
		slog.String("user_agent", a.agent))
}
