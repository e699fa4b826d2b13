// Package accesslog has the log of requests to sandboxes, and tells which are actions for the audit log. It never has a query, which may hold signatures.
package accesslog

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
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
	audit func(*Record)
}

// New returns a log at level info. If log is nil, records go to other, at level debug. Those of actions in a sandbox go to audit
// too, which may be nil.
func New(log, other *slog.Logger, audit func(*Record)) Log {
	if log == nil {
		return Log{other, slog.LevelDebug, audit}
	}
	return Log{log, slog.LevelInfo, audit}
}

// Enabled reports whether the record of a request is written.
func (l *Log) Enabled(ctx context.Context, port uint16, method, path string) bool {
	return l.log.Enabled(ctx, l.level) || l.audited(port, method, path)
}

func (l *Log) audited(port uint16, method, path string) bool {
	return l.audit != nil && port == envd.Port && ActionOf(method, path) != ""
}

// actions of the agent's API, by path. Reads are none, and neither is each chunk of a terminal's input.
var actions = map[string]string{
	processpb.ProcessStartProcedure: "start process", processpb.ProcessConnectProcedure: "attach process", processpb.ProcessSendSignalProcedure: "signal process",
	filesystempb.FilesystemMakeDirProcedure: "write files", filesystempb.FilesystemMoveProcedure: "write files", filesystempb.FilesystemRemoveProcedure: "delete files",
}

// ActionOf returns what a request to an agent does, as the audit log has it; empty for what is not recorded.
func ActionOf(method, path string) string {
	if method != http.MethodPost && method != http.MethodPut {
		return ""
	}
	switch path {
	case "/files", "/upload":
		return "write files"
	case "/execute":
		return "start process"
	}
	return actions[path]
}

// Write writes a record.
func (l *Log) Write(ctx context.Context, a *Record) {
	if l.audited(a.Port, a.Method, a.Path) {
		l.audit(a)
	}
	l.log.LogAttrs(ctx, l.level, "request",
		slog.String(telemetry.Sandbox, string(a.Sandbox)), slog.Int(telemetry.Port, int(a.Port)),
		slog.String(telemetry.Method, a.Method), slog.String("host", a.Host), slog.String(telemetry.Path, a.Path),
		slog.String("proto", a.Proto), slog.String("remote", a.Remote),
		slog.Int(telemetry.Status, a.Status), slog.Int64("bytes", a.Bytes), slog.Int64("received", a.Received),
		slog.Duration("first_byte", a.FirstByte), slog.Duration(telemetry.Duration, time.Since(a.Started)),
		slog.Bool("woken", a.Woken), slog.String(telemetry.Reason, a.Reason), slog.String("trace", a.Trace),
		slog.String("user_agent", a.UserAgent))
}
