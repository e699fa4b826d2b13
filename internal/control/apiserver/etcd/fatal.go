package etcd

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"go.uber.org/zap/zapcore"
)

// fatalHook replaces the end of the process after a fatal log entry of etcd.
//
// While etcd starts, the goroutine ends: files that cannot be opened are an error of Open, and a
// panic on one of etcd's own goroutines cannot be recovered. Afterwards the goroutine blocks
// permanently, with its locks: etcd must not continue, and its acknowledged writes are on disk.
// So the rest of the process can stop in order and report the cause.
type fatalHook struct {
	starting atomic.Bool
	stuck    atomic.Bool     // a goroutine of etcd blocks permanently
	running  context.Context //nolint:containedctx // done after a fatal entry, which is its cause
	stop     context.CancelCauseFunc
}

func newFatalHook(ctx context.Context) *fatalHook {
	h := &fatalHook{}
	h.running, h.stop = context.WithCancelCause(context.WithoutCancel(ctx))
	h.starting.Store(true)
	return h
}

func (h *fatalHook) cause() error { return context.Cause(h.running) }

func (h *fatalHook) OnWrite(ce *zapcore.CheckedEntry, fields []zapcore.Field) {
	starting := h.starting.Load()
	err := errors.New(ce.Message)
	for _, f := range fields {
		if cause, ok := f.Interface.(error); ok && f.Type == zapcore.ErrorType {
			err = fmt.Errorf("%s: %w", ce.Message, cause)
		}
	}
	h.stop(err)
	h.stuck.Store(!starting)
	if starting {
		runtime.Goexit()
	}
	select {}
}
