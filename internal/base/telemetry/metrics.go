package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/trace"
)

// MetricsNamespace is the prefix of every Barchan metric.
const MetricsNamespace = "barchan"

// Buckets returns the upper bounds, in seconds, for histograms of durations:
// from 0.25 ms, about doubling, to a minute.
func Buckets() []float64 {
	return []float64{
		0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075,
		0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60,
	}
}

// NewRegistry returns a registry that has the Go runtime's and the process's
// own metrics, and barchan_build_info with the given version.
func NewRegistry(version string) *prometheus.Registry {
	r := prometheus.NewRegistry()
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace:   MetricsNamespace,
		Name:        "build_info",
		Help:        "Always 1; the label is the version of the program.",
		ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	r.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		build,
	)
	return r
}

// DurationOpts returns the options of a histogram of seconds with our buckets.
// The name is completed to barchan_<subsystem>_<name>_seconds.
func DurationOpts(subsystem, name, help string) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{
		Namespace: MetricsNamespace,
		Subsystem: subsystem,
		Name:      name + "_seconds",
		Help:      help,
		Buckets:   Buckets(),
	}
}

// Register registers collectors. A nil Registerer registers none.
func Register(to prometheus.Registerer, collectors ...prometheus.Collector) error {
	if to == nil {
		return nil
	}
	var all error
	for _, c := range collectors {
		all = errors.Join(all, to.Register(c))
	}
	if all != nil {
		return fmt.Errorf("register metrics: %w", all)
	}
	return nil
}

// MetricsHandler serves the gatherers' metrics, for /metrics. An error of one does not hide the
// metrics of the others.
func MetricsHandler(gatherers ...prometheus.Gatherer) http.Handler {
	return promhttp.HandlerFor(prometheus.Gatherers(gatherers), promhttp.HandlerOpts{
		ErrorHandling:     promhttp.ContinueOnError,
		EnableOpenMetrics: true, // has the exemplars
	})
}

// ObserveSince observes the seconds since start, with the trace of ctx as exemplar where there is one that is kept.
func ObserveSince(ctx context.Context, to prometheus.Observer, start time.Time) {
	seconds := time.Since(start).Seconds()
	if span := trace.SpanContextFromContext(ctx); span.IsSampled() {
		if e, ok := to.(prometheus.ExemplarObserver); ok {
			e.ObserveWithExemplar(seconds, prometheus.Labels{"trace_id": span.TraceID().String()})
			return
		}
	}
	to.Observe(seconds)
}
