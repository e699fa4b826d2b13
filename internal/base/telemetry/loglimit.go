package telemetry

import (
	"context"
	"log/slog"
	"sync"

	"golang.org/x/time/rate"
)

// Bounds of warnings and errors with one message: what a sandbox or a client provokes with each request must neither fill the disk nor
// have the journal drop other lines.
const (
	linesPerSecond = 20
	linesAtOnce    = 200
	maxMessages    = 1000 // messages are constant; those of libraries may not be
)

// limitHandler drops warnings and errors whose message comes too often. The next line that it writes of the message has their number.
type limitHandler struct {
	slog.Handler
	lines *lines
}

type lines struct {
	mu sync.Mutex
	of map[string]*messageLines // by message; +checklocks:mu
}

// messageLines are those of one message; guarded by lines.mu.
type messageLines struct {
	limiter *rate.Limiter
	dropped int
}

func limited(h slog.Handler) slog.Handler {
	return limitHandler{h, &lines{of: map[string]*messageLines{}}}
}

// Handle implements slog.Handler.
func (h limitHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelWarn {
		return h.Handler.Handle(ctx, r)
	}
	dropped, ok := h.lines.take(&r)
	if !ok {
		return nil
	}
	if dropped > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("dropped_before", dropped))
	}
	return h.Handler.Handle(ctx, r)
}

// take returns how many lines were dropped before this one; false if it is dropped too.
func (l *lines) take(r *slog.Record) (dropped int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.of[r.Message]
	if m == nil {
		if len(l.of) >= maxMessages {
			clear(l.of)
		}
		m = &messageLines{limiter: rate.NewLimiter(linesPerSecond, linesAtOnce)}
		l.of[r.Message] = m
	}
	if !m.limiter.AllowN(r.Time, 1) {
		m.dropped++
		return 0, false
	}
	dropped, m.dropped = m.dropped, 0
	return dropped, true
}

// WithAttrs implements slog.Handler.
func (h limitHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return limitHandler{h.Handler.WithAttrs(attrs), h.lines}
}

// WithGroup implements slog.Handler.
func (h limitHandler) WithGroup(name string) slog.Handler {
	return limitHandler{h.Handler.WithGroup(name), h.lines}
}
