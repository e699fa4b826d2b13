package node

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// BenchmarkColdCreate makes sandboxes until their agents answer, and tells the share of each step.
func BenchmarkColdCreate(b *testing.B) {
	for _, c := range []string{"gvisor", "runc"} {
		b.Run(c, func(b *testing.B) {
			m := newMachine(b)
			var mu sync.Mutex
			took := map[string][]time.Duration{}
			n, _ := m.node(func(cfg *Config) {
				cfg.ObserveStep = func(_, step string, d time.Duration) {
					mu.Lock()
					defer mu.Unlock()
					took[step] = append(took[step], d)
				}
			})
			var removed []time.Duration
			for b.Loop() {
				s := object(class(c))
				ensure(b, n, s)
				b.StopTimer()
				began := time.Now()
				if err := n.Remove(b.Context(), refOf(s)); err != nil {
					b.Fatal(err)
				}
				removed = append(removed, time.Since(began))
				b.StartTimer()
			}
			mu.Lock()
			defer mu.Unlock()
			b.ReportMetric(millis(took["total"], 50), "p50-ms")
			b.ReportMetric(millis(took["total"], 99), "p99-ms")
			b.ReportMetric(millis(removed, 50), "remove-p50-ms")
			var shares strings.Builder
			for _, step := range slices.Sorted(maps.Keys(took)) {
				fmt.Fprintf(&shares, "\n%-16s p50 %8.2f ms  %3.0f %% of the whole", step, millis(took[step], 50), 100*millis(took[step], 50)/millis(took["total"], 50))
			}
			b.Log(shares.String())
		})
	}
}

func millis(all []time.Duration, percentile int) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.SortFunc(all, cmp.Compare[time.Duration])
	return float64(all[min(len(all)-1, len(all)*percentile/100)].Microseconds()) / 1000
}
