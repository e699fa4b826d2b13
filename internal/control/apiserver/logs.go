package apiserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"k8s.io/klog/v2"
)

// lowered is a handler for the logs of libraries: what they call an error is for us, who
// handle or retry it, a warning, and what they tell in passing is for debugging. What they have
// for their own debugging is dropped: it shows bodies, and with them secrets.
type lowered struct{ slog.Handler }

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

// klogOnce guards klog's logger, which is one for the process: the first server's log has it.
var klogOnce sync.Once

func routeKlog(log *slog.Logger) {
	klogOnce.Do(func() { klog.SetSlogLogger(slog.New(lowered{log.Handler()}).With("library", "kubernetes")) })
}

// zapSlog is a zap core that writes to a slog handler.
type zapSlog struct {
	handler slog.Handler
	ctx     func() context.Context
}

// fatalHook is what becomes of a log entry after which a library wants the process to end.
// While etcd starts, the entry is handed over and the goroutine ends: files that cannot be
// opened are an error of Start, and etcd opens some of them on goroutines where nobody could
// catch a panic. Afterwards the entry is handed over and the goroutine stands still for ever,
// with all that it has locked: etcd must not go on, and what it has acknowledged is on disk. So
// the rest of the process comes to an orderly end, with words and not with a stack.
type fatalHook struct {
	starting atomic.Bool
	over     atomic.Bool // etcd stands still
	said     chan error
}

func newLastWords() *fatalHook {
	w := &fatalHook{said: make(chan error, 1)}
	w.starting.Store(true)
	return w
}

// OnWrite implements zapcore.CheckWriteHook.
func (w *fatalHook) OnWrite(ce *zapcore.CheckedEntry, fields []zapcore.Field) {
	starting := w.starting.Load()
	w.over.Store(!starting)
	err := errors.New(ce.Message)
	for _, f := range fields {
		if cause, ok := f.Interface.(error); ok && f.Type == zapcore.ErrorType {
			err = fmt.Errorf("%s: %w", ce.Message, cause)
		}
	}
	select {
	case w.said <- err:
	default:
	}
	if starting {
		runtime.Goexit()
	}
	select {}
}

// newZap returns etcd's logger.
func newZap(ctx context.Context, log *slog.Logger, last zapcore.CheckWriteHook) *zap.Logger {
	h := lowered{log.Handler()}.WithAttrs([]slog.Attr{slog.String("library", "etcd")})
	root := context.WithoutCancel(ctx)
	return zap.New(zapSlog{handler: h, ctx: func() context.Context { return root }}, zap.WithFatalHook(last), zap.WithPanicHook(last))
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

func (z zapSlog) Enabled(l zapcore.Level) bool { return z.handler.Enabled(z.ctx(), slogLevel(l)) }

func (z zapSlog) With(fields []zapcore.Field) zapcore.Core {
	return zapSlog{handler: z.handler.WithAttrs(zapAttrs(fields)), ctx: z.ctx}
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
	return z.handler.Handle(z.ctx(), r)
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
