package etcd

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
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
	stuck    atomic.Bool   // a goroutine of etcd blocks permanently
	logged   chan struct{} // closed after the first fatal entry
	once     sync.Once
	err      error // of the first entry; read after logged
}

func newFatalHook() *fatalHook {
	h := &fatalHook{logged: make(chan struct{})}
	h.starting.Store(true)
	return h
}

// cause returns the first fatal entry and blocks until there is one.
func (h *fatalHook) cause() error {
	<-h.logged
	return h.err
}

// OnWrite implements zapcore.CheckWriteHook.
func (h *fatalHook) OnWrite(ce *zapcore.CheckedEntry, fields []zapcore.Field) {
	starting := h.starting.Load()
	h.stuck.Store(!starting)
	h.once.Do(func() {
		h.err = errors.New(ce.Message)
		for _, f := range fields {
			if cause, ok := f.Interface.(error); ok && f.Type == zapcore.ErrorType {
				h.err = fmt.Errorf("%s: %w", ce.Message, cause)
			}
		}
		close(h.logged)
	})
	if starting {
		runtime.Goexit()
	}
	select {}
}
