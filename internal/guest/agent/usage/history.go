package usage

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// History measures every envd.MetricsInterval and keeps envd.MaxMetrics samples. They are memory of the sandbox: a sleep keeps
// them, a fork has its origin's, and a restart of the container loses them.
type History struct {
	log     *slog.Logger
	measure func() (envd.Metrics, error)

	mu   sync.Mutex
	kept []envd.Metrics // oldest first; +checklocks:mu
}

// NewHistory returns an empty History. Run fills it.
func NewHistory(log *slog.Logger) *History {
	return &History{log: log, measure: NewSampler().Measure} // clients of another Sampler do not shorten its spans
}

// Run measures until ctx ends.
func (h *History) Run(ctx context.Context) {
	tick := time.NewTicker(envd.MetricsInterval)
	defer tick.Stop()
	failed := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		m, err := h.measure()
		if err != nil {
			if !failed {
				h.log.WarnContext(ctx, "usage not measured", "error", err)
			}
			failed = true
			continue
		}
		failed = false
		h.mu.Lock()
		if len(h.kept) == envd.MaxMetrics {
			copy(h.kept, h.kept[1:])
			h.kept = h.kept[:envd.MaxMetrics-1]
		}
		h.kept = append(h.kept, m)
		h.mu.Unlock()
	}
}

// Samples returns a copy of the samples from a second on, oldest first.
func (h *History) Samples(since int64) []envd.Metrics {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(h.kept), func(m envd.Metrics) bool { return m.Timestamp < since })
}
