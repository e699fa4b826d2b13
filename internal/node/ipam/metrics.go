package ipam

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const subsystem = "ipam"

type metrics struct {
	repairs    *prometheus.CounterVec
	reconciles *prometheus.CounterVec
	conflicts  prometheus.Gauge
}

func newMetrics(to prometheus.Registerer, allocator *Allocator) (*metrics, error) {
	m := &metrics{
		repairs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "repairs_total",
			Help: "Repaired differences between the lease table and addresses in use, by kind of repair.",
		}, []string{"kind"}),
		reconciles: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "reconciles_total",
			Help: "Comparisons of the lease table with addresses in use, by result.",
		}, []string{"result"}),
		conflicts: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "conflicts",
			Help: "Addresses in use by a non-owner, at the last comparison.",
		}),
	}
	for _, kind := range []string{Reclaimed, Released, Isolated, Conflict} {
		m.repairs.WithLabelValues(kind) // zero, not absent
	}
	if to == nil {
		return m, nil
	}
	leases := &leaseCollector{allocator: allocator, desc: prometheus.NewDesc(
		prometheus.BuildFQName(telemetry.MetricsNamespace, subsystem, "addresses"),
		"Addresses by subnet and state.", []string{"subnet", "state"}, nil)}
	var all error
	for _, c := range []prometheus.Collector{m.repairs, m.reconciles, m.conflicts, leases} {
		all = errors.Join(all, to.Register(c))
	}
	return m, all
}

// leaseCollector counts addresses at each scrape.
type leaseCollector struct {
	allocator *Allocator
	desc      *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *leaseCollector) Describe(to chan<- *prometheus.Desc) { to <- c.desc }

// Collect implements prometheus.Collector.
func (c *leaseCollector) Collect(to chan<- prometheus.Metric) {
	for _, n := range c.allocator.Counts() {
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
