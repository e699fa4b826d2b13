package node

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const subsystem = "node"

// metrics of a node.
type metrics struct {
	// sweeps counts the scans for orphans, removals those that were removed.
	sweeps, removals *prometheus.CounterVec
	// oomKills counts killed processes, firewallLosses removals of rules by other programs.
	oomKills, firewallLosses prometheus.Counter
	// lowered counts sandboxes with the lowest priority for processors.
	lowered prometheus.Gauge
	steps   *prometheus.HistogramVec
}

// Metrics registers the metrics of a node without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to)
	return err
}

func newMetrics(to prometheus.Registerer) (*metrics, error) {
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: name, Help: help}
	}
	m := &metrics{
		sweeps: prometheus.NewCounterVec(counter("sweeps_total",
			"Scans of the host for resources that belong to no sandbox, by result: `ok`, `failed`."), []string{"result"}),
		removals: prometheus.NewCounterVec(counter("leftovers_removed_total",
			"Resources that belonged to no sandbox and were removed from the host, by kind: containers, mounts, network namespaces and others."), []string{"kind"}),
		oomKills: prometheus.NewCounter(counter("oom_kills_total",
			"Processes of gVisor sandboxes that were killed because the sandbox had reached its memory limit.")),
		firewallLosses: prometheus.NewCounter(counter("firewall_losses_total",
			"How often another program removed the firewall rules that confine sandboxes. They were restored.")),
		lowered: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "lowered_sandboxes",
			Help: "Number of sandboxes that have the lowest priority for processors, because they used more than their share while others waited.",
		}),
		steps: prometheus.NewHistogramVec(telemetry.DurationOpts(subsystem, "step",
			"Time of one step of the work on a sandbox, such as a create or a pause, by runtime (`gvisor`, `runc`) and step. `total`: a whole create; `undo_…`: the step was undone after a failure."),
			[]string{"runtime", "step"}),
	}
	return m, telemetry.Register(to, m.sweeps, m.removals, m.oomKills, m.firewallLosses, m.lowered, m.steps)
}

func (m *metrics) observeStep(class, step string, took time.Duration) {
	m.steps.WithLabelValues(class, step).Observe(took.Seconds())
}
