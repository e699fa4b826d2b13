package gateway

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const subsystem = "gateway"

type metrics struct {
	firstByte prometheus.Histogram
	exec      prometheus.Histogram
	wake      prometheus.Histogram
	requests  [len(classes)]prometheus.Counter // by class
	inFlight  prometheus.Gauge
	dials     *prometheus.CounterVec
	idle      *prometheus.CounterVec
}

// Metrics registers the metrics of a gateway without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to)
	return err
}

func newMetrics(to prometheus.Registerer) (*metrics, error) {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: name, Help: help,
		}, labels)
	}
	m := &metrics{
		firstByte: prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "first_byte", "Time from the arrival of a request to a sandbox until the gateway has the head of the sandbox's response.")),
		exec:      prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "exec", "Time from the arrival of a request that starts a process in a sandbox until the process runs.")),
		wake:      prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "wake", "Time that a request waited for its paused sandbox to be resumed.")),
		dials:     counter("dials_total", "Connections from the gateway to sandboxes, by result: `ok`, `failed`, or `unproved`: what answered at the address did not prove to be the sandbox's agent.", "result"),
		idle:      counter("idle_actions_total", "Sandboxes that were paused or deleted because they had no traffic, by action (`pause`, `shutdown`) and result: `ok`, `failed`, or `overtaken`: another client changed the sandbox at the same time.", "action", "result"),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "in_flight",
			Help: "Number of requests to sandboxes in progress, streams and WebSockets included.",
		}),
	}
	requests := counter("requests_total", "Requests to sandboxes, by class of the response, `2xx` for instance. `aborted`: the request ended without a whole response.", "class")
	for i, class := range classes {
		m.requests[i] = requests.WithLabelValues(class)
	}
	return m, telemetry.Register(to, m.firstByte, m.exec, m.wake, requests, m.dials, m.idle, m.inFlight)
}

var classes = [...]string{"aborted", "1xx", "2xx", "3xx", "4xx", "5xx", "other"}

// answered counts a response by its class.
func (m *metrics) answered(status int) {
	c := status / 100
	if c < 0 || c >= len(classes) {
		c = len(classes) - 1
	}
	m.requests[c].Inc()
}
