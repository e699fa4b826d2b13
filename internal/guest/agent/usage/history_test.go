package usage

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// TestHistory: the newest samples are kept, one for each interval, and a measurement that fails leaves a gap.
func TestHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHistory(slog.New(slog.DiscardHandler))
		ticks := uint64(0)
		h.measure = func() (envd.Metrics, error) {
			if ticks++; ticks == 3 {
				return envd.Metrics{}, errors.New("no")
			}
			return envd.Metrics{MemUsed: ticks}, nil
		}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go h.Run(ctx)
		time.Sleep(4*envd.MetricsInterval + time.Second)
		if got := h.Samples(0); len(got) != 3 || got[0].MemUsed != 1 || got[2].MemUsed != 4 {
			t.Errorf("samples are %+v", got)
		}
		time.Sleep(envd.MaxMetrics * envd.MetricsInterval)
		got := h.Samples(0)
		if len(got) != envd.MaxMetrics || got[0].MemUsed != 5 || got[envd.MaxMetrics-1].MemUsed != envd.MaxMetrics+4 {
			t.Errorf("%d samples, from %d to %d", len(got), got[0].MemUsed, got[len(got)-1].MemUsed)
		}
	})
}

// TestHistoryMeasures: what it keeps is real.
func TestHistoryMeasures(t *testing.T) {
	m, err := NewHistory(slog.New(slog.DiscardHandler)).measure()
	if err != nil || m.MemTotal == 0 || m.DiskTotal == 0 || time.Since(time.Unix(m.Timestamp, 0)) > time.Minute {
		t.Errorf("measured %+v, %v", m, err)
	}
}
