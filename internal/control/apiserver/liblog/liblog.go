// Package liblog writes the logs of libraries, of klog and of zap, to slog.
//
// It drops their debugging entries, which show bodies and with them secrets. It does not decide
// which libraries log.
package liblog

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"k8s.io/klog/v2"
)

// lowered lowers the level of a library's entries: we handle or retry what a library reports as an
// error, so it is a warning, and its information is for debugging.
type lowered struct{ slog.Handler }

// Lower returns a handler for the entries of a library.
func Lower(log *slog.Logger) slog.Handler { return lowered{log.Handler()} }

func lowerLevel(l slog.Level) slog.Level {
	switch {
	case l >= slog.LevelError:
		return slog.LevelWarn
	case l >= slog.LevelWarn:
		return slog.LevelInfo
	default:
		return slog.LevelDebug
	}
}

func (h lowered) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelInfo && h.Handler.Enabled(ctx, lowerLevel(l))
}

func (h lowered) Handle(ctx context.Context, r slog.Record) error {
	r.Level = lowerLevel(r.Level)
	return h.Handler.Handle(ctx, r)
}

func (h lowered) WithAttrs(attrs []slog.Attr) slog.Handler {
	return lowered{h.Handler.WithAttrs(attrs)}
}

func (h lowered) WithGroup(name string) slog.Handler { return lowered{h.Handler.WithGroup(name)} }

// klogOnce guards klog's logger, which the process has once: the first caller's log is used.
var klogOnce sync.Once

// RouteKlog makes klog write to log.
func RouteKlog(log *slog.Logger) {
	klogOnce.Do(func() { klog.SetSlogLogger(slog.New(Lower(log)).With("library", "kubernetes")) })
}

// Of entries with the same message in a second, as etcd writes hundreds of when it starts, the first few are written, and then one of many.
const (
	sameEntries = 10
	oneOf       = 100
)

// NewZap returns a logger for etcd. After a fatal entry or a panic, hook is called.
func NewZap(ctx context.Context, log *slog.Logger, hook zapcore.CheckWriteHook) *zap.Logger {
	h := Lower(log).WithAttrs([]slog.Attr{slog.String("library", "etcd")})
	core := zapcore.NewSamplerWithOptions(zapSlog{h, context.WithoutCancel(ctx)}, time.Second, sameEntries, oneOf)
	return zap.New(core, zap.WithFatalHook(hook), zap.WithPanicHook(hook))
}

// zapSlog is a zap core that writes to a slog handler.
type zapSlog struct {
	handler slog.Handler
	ctx     context.Context //nolint:containedctx // zap passes none
}

func slogLevel(l zapcore.Level) slog.Level {
	switch {
	case l >= zapcore.ErrorLevel:
		return slog.LevelError
	case l == zapcore.WarnLevel:
		return slog.LevelWarn
	case l == zapcore.InfoLevel:
		return slog.LevelInfo
	default:
		return slog.LevelDebug
	}
}

func (z zapSlog) Enabled(l zapcore.Level) bool { return z.handler.Enabled(z.ctx, slogLevel(l)) }

func (z zapSlog) With(fields []zapcore.Field) zapcore.Core {
	return zapSlog{z.handler.WithAttrs(zapAttrs(fields)), z.ctx}
}

func (z zapSlog) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if z.Enabled(e.Level) {
		return ce.AddCore(e, z)
	}
	return ce
}

func (z zapSlog) Write(e zapcore.Entry, fields []zapcore.Field) error {
	r := slog.NewRecord(e.Time, slogLevel(e.Level), e.Message, 0)
	r.AddAttrs(zapAttrs(fields)...)
	return z.handler.Handle(z.ctx, r)
}

func (z zapSlog) Sync() error { return nil }

func zapAttrs(fields []zapcore.Field) []slog.Attr {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(enc)
	}
	attrs := make([]slog.Attr, 0, len(enc.Fields))
	for k, v := range enc.Fields {
		attrs = append(attrs, slog.Any(k, v))
	}
	return attrs
}
