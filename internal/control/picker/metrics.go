package picker

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const subsystem = "picker"

// Results of picks, and of tries that led to none.
const (
	resultWarm     = "warm"     // a member was ready
	resultWaited   = "waited"   // a member became ready
	resultNone     = "none"     // start one cold
	resultFailed   = "failed"   // no result: a timeout, or an error of the API server
	resultConflict = "conflict" // a write that another claim won
)

type metrics struct {
	picks *prometheus.CounterVec
	wait  prometheus.Histogram
	ready prometheus.Gauge
}

func newMetrics(to prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		picks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "picks_total",
			Help: "Picks of warm members by result; conflict counts tries, not picks.",
		}, []string{"result"}),
		wait: prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "wait", "Time that picks spent waiting for a member that is being created.")),
		ready: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "ready",
			Help: "Members of warm pools that can be handed out, of all pools and revisions.",
		}),
	}
	if to == nil {
		return m, nil
	}
	var all error
	for _, c := range []prometheus.Collector{m.picks, m.wait, m.ready} {
		all = errors.Join(all, to.Register(c))
	}
	return m, all
}
