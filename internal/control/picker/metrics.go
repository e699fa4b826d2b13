package picker

import (
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

// Metrics registers the metrics of a picker without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to)
	return err
}

func newMetrics(to prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		picks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "picks_total",
			Help: "Attempts to give a ready sandbox of a warm pool to a claim, by result. `warm`: one was ready; `waited`: one that was being created became ready; `none`: the claim starts a sandbox cold; `failed`: a timeout or an error of the API server; `conflict`: another claim got the same sandbox first, and the attempt is repeated.",
		}, []string{"result"}),
		wait: prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "wait", "Time that a claim waited for a sandbox of a warm pool that was being created.")),
		ready: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "ready",
			Help: "Number of ready sandboxes in all warm pools that a claim can get.",
		}),
	}
	return m, telemetry.Register(to, m.picks, m.wait, m.ready)
}
