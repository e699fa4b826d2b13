package gateway

import (
	"errors"

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

func newMetrics(to prometheus.Registerer) (*metrics, error) {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: name, Help: help,
		}, labels)
	}
	m := &metrics{
		firstByte: prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "first_byte", "Time from a request's arrival to the head of its response from the sandbox.")),
		exec:      prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "exec", "Time from the arrival of a request to start a process in a sandbox to the head of its response: the process runs.")),
		wake:      prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "wake", "Time that a wake by traffic took.")),
		dials:     counter("dials_total", "Connections made to sandboxes, by result; unproved: the agent at the address did not prove to be the sandbox's.", "result"),
		idle:      counter("idle_actions_total", "What was done to sandboxes without traffic, by action and result; overtaken: another client changed it meanwhile.", "action", "result"),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: "in_flight",
			Help: "Requests to sandboxes in progress, streams and WebSockets included.",
		}),
	}
	requests := counter("requests_total", "Requests to sandboxes by class of their response; aborted: ended without a whole one.", "class")
	for i, class := range classes {
		m.requests[i] = requests.WithLabelValues(class)
	}
	if to == nil {
		return m, nil
	}
	var all error
	for _, c := range []prometheus.Collector{m.firstByte, m.exec, m.wake, requests, m.dials, m.idle, m.inFlight} {
		all = errors.Join(all, to.Register(c))
	}
	return m, all
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
