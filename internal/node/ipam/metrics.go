package ipam

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const subsystem = "ipam"

type metrics struct {
	repairs    *prometheus.CounterVec
	reconciles *prometheus.CounterVec
	conflicts  prometheus.Gauge
}

// Metrics registers the metrics of a reconciler without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to, func() []Counts { return []Counts{{}} })
	return err
}

func newMetrics(to prometheus.Registerer, counts func() []Counts) (*metrics, error) {
	m := &metrics{
		repairs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "repairs_total",
			Help: "Differences between the table of leased addresses and the addresses in use, by kind. `reclaimed`: an address in use was leased again to its sandbox; `released`: a lease of no sandbox ended; `quarantined`: an address in use by an unknown owner is not given away; `conflict`: two owners, nothing was changed.",
		}, []string{"kind"}),
		reconciles: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "reconciles_total",
			Help: "Comparisons of the table of leased addresses with the addresses in use, by result: `done`, `failed`.",
		}, []string{"result"}),
		conflicts: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "conflicts",
			Help: "Number of addresses that another than their owner used at the last comparison.",
		}),
	}
	for _, kind := range []string{Reclaimed, Released, Isolated, Conflict} {
		m.repairs.WithLabelValues(kind) // zero, not absent
	}
	leases := &leaseCollector{counts: counts, desc: prometheus.NewDesc(
		prometheus.BuildFQName(telemetry.MetricsNamespace, subsystem, "addresses"),
		"Number of addresses of sandboxes, by subnet and state: `free`, `reserved` and `held` (of sandboxes), `cooling` (released, not given away again yet), `quarantined` (in use by an unknown owner), `unread` (an unreadable lease).", []string{"subnet", "state"}, nil)}
	return m, telemetry.Register(to, m.repairs, m.reconciles, m.conflicts, leases)
}

// leaseCollector counts addresses at each scrape.
type leaseCollector struct {
	counts func() []Counts
	desc   *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *leaseCollector) Describe(to chan<- *prometheus.Desc) { to <- c.desc }

// Collect implements prometheus.Collector.
func (c *leaseCollector) Collect(to chan<- prometheus.Metric) {
	for _, n := range c.counts() {
		states := map[string]int{
			string(Reserved): n.Reserved, string(Held): n.Held, string(Quarantined): n.Quarantined, string(Cooling): n.Cooling,
		}
		if n.Current {
			states["free"], states["unread"] = n.Free, n.Unread
		}
		for state, count := range states {
			to <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(count), n.Subnet.String(), state)
		}
	}
}
