package peers

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const subsystem = "peers"

// Why routes were not sent: labels of lost.
const (
	lostOverflow = "overflow" // the member's queue was full
	lostInvalid  = "invalid"  // no member would take it
	lostRefused  = "refused"  // the member rejected it
	lostGone     = "gone"     // the member left
)

// Why batches are rejected: labels of refused.
const (
	refusedName      = "name"   // the certificate is another member's
	refusedMember    = "member" // not a member by gossip
	refusedBoot      = "boot"   // of or for an earlier process
	refusedReplay    = "replay"
	refusedSize      = "size"
	refusedRoutes    = "routes" // too many
	refusedMalformed = "malformed"
	refusedRequest   = "request" // another path, method or content type
)

// Why gossip is rejected: labels of gossip.
const (
	gossipKey      = "key"      // encrypted with another key, or not at all
	gossipName     = "name"     // of a member that is alive elsewhere
	gossipMember   = "member"   // invalid or unknown metadata
	gossipTooMany  = "too_many" // more than maxMembers
	resultOK       = "ok"
	resultFailed   = "failed"
	resultRejected = "rejected"
)

type metrics struct {
	members  prometheus.Gauge
	queued   prometheus.GaugeFunc
	pushed   prometheus.Counter
	merged   prometheus.Counter
	onLeave  *prometheus.CounterVec
	batches  *prometheus.CounterVec
	took     prometheus.Histogram
	received prometheus.Counter
	refused  *prometheus.CounterVec
	gossip   *prometheus.CounterVec
	joins    *prometheus.CounterVec
}

// Metrics registers the metrics of a replica without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to, func() float64 { return 0 })
	return err
}

func newMetrics(to prometheus.Registerer, queued func() float64) (*metrics, error) {
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: name, Help: help}
	}
	gauge := func(name, help string) prometheus.GaugeOpts {
		return prometheus.GaugeOpts{Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: name, Help: help}
	}
	m := &metrics{
		members:  prometheus.NewGauge(gauge("members", "Number of other replicas that this one is connected to.")),
		queued:   prometheus.NewGaugeFunc(gauge("queued", "Number of routes that wait to be sent to other replicas, over all of them."), queued),
		pushed:   prometheus.NewCounter(counter("pushed_total", "Routes that other replicas have accepted. A route is where the traffic of a sandbox goes.")),
		merged:   prometheus.NewCounter(counter("coalesced_total", "Routes not sent because a newer one of the same sandbox was sent instead.")),
		onLeave:  prometheus.NewCounterVec(counter("lost_total", "Routes not sent, by reason. `overflow`: the queue for a replica was full; `invalid`: no replica would accept it; `refused`: the replica rejected it; `gone`: the replica left. The watch of the API server delivers them later."), []string{"reason"}),
		batches:  prometheus.NewCounterVec(counter("batches_total", "Batches of routes sent to other replicas, by result: `ok`, `failed`, `rejected`."), []string{"result"}),
		took:     prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "batch", "Time from sending a batch of routes until the other replica accepted it.")),
		received: prometheus.NewCounter(counter("received_total", "Routes accepted from other replicas.")),
		refused:  prometheus.NewCounterVec(counter("refused_total", "Batches and connections of other replicas that this one rejected, by reason. `name`: the certificate is another replica's; `member`: not a known replica; `boot`, `replay`: of an earlier process, or sent twice; `size`, `routes`, `malformed`, `request`: not a valid batch."), []string{"reason"}),
		gossip:   prometheus.NewCounterVec(counter("gossip_refused_total", "Messages about membership that were rejected, by reason. `key`: encrypted with another key; `name`: the name of a replica that is alive elsewhere; `member`: invalid metadata; `too_many`: more replicas than allowed."), []string{"reason"}),
		joins:    prometheus.NewCounterVec(counter("joins_total", "Attempts to join the other replicas at one address, by result: `ok`, `failed`."), []string{"result"}),
	}
	return m, telemetry.Register(to, m.members, m.queued, m.pushed, m.merged, m.onLeave, m.batches, m.took, m.received, m.refused, m.gossip, m.joins)
}
