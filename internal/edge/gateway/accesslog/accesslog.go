// Package accesslog has the log of requests to sandboxes. It never has a query, which may hold signatures.
package accesslog

import (
	"context"
	"log/slog"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// Record is one request.
type Record struct {
	Sandbox                                      sandbox.ID
	Port                                         uint16
	Method, Host, Path, Proto, Remote, UserAgent string
	Status                                       int
	Bytes, Received                              int64         // of the bodies
	FirstByte                                    time.Duration // 0: there was no response
	Started                                      time.Time
	Woken                                        bool   // it started a wake, or waited for one
	Reason                                       string // of a local reply
	Trace                                        string
}

// Log writes records. The zero value is not ready; make one with New.
type Log struct {
	log   *slog.Logger
	level slog.Level
}

// New returns a log at level info. If log is nil, records go to other, at level debug.
func New(log, other *slog.Logger) Log {
	if log == nil {
		return Log{other, slog.LevelDebug}
	}
	return Log{log, slog.LevelInfo}
}

// Enabled reports whether records are written.
func (l *Log) Enabled(ctx context.Context) bool { return l.log.Enabled(ctx, l.level) }

// Write writes a record.
func (l *Log) Write(ctx context.Context, a *Record) {
	l.log.LogAttrs(ctx, l.level, "request",
		slog.String(telemetry.Sandbox, string(a.Sandbox)), slog.Int(telemetry.Port, int(a.Port)),
		slog.String(telemetry.Method, a.Method), slog.String("host", a.Host), slog.String(telemetry.Path, a.Path),
		slog.String("proto", a.Proto), slog.String("remote", a.Remote),
		slog.Int(telemetry.Status, a.Status), slog.Int64("bytes", a.Bytes), slog.Int64("received", a.Received),
		slog.Duration("first_byte", a.FirstByte), slog.Duration(telemetry.Duration, time.Since(a.Started)),
		slog.Bool("woken", a.Woken), slog.String(telemetry.Reason, a.Reason), slog.String("trace", a.Trace),
		slog.String("user_agent", a.UserAgent))
}
