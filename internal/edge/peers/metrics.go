package peers

import (
	"errors"

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

func newMetrics(to prometheus.Registerer, queued func() float64) (*metrics, error) {
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: name, Help: help}
	}
	gauge := func(name, help string) prometheus.GaugeOpts {
		return prometheus.GaugeOpts{Namespace: telemetry.MetricsNamespace, Subsystem: subsystem, Name: name, Help: help}
	}
	m := &metrics{
		members:  prometheus.NewGauge(gauge("members", "Other replicas that are members now.")),
		queued:   prometheus.NewGaugeFunc(gauge("queued", "Routes that wait to be sent, over all members."), queued),
		pushed:   prometheus.NewCounter(counter("pushed_total", "Routes that members have taken.")),
		merged:   prometheus.NewCounter(counter("coalesced_total", "Routes not sent because a newer one of the same sandbox was.")),
		onLeave:  prometheus.NewCounterVec(counter("lost_total", "Routes not sent, by reason."), []string{"reason"}),
		batches:  prometheus.NewCounterVec(counter("batches_total", "Batches sent, by result."), []string{"result"}),
		took:     prometheus.NewHistogram(telemetry.DurationOpts(subsystem, "batch", "Time from sending a batch until it was taken.")),
		received: prometheus.NewCounter(counter("received_total", "Routes taken from members.")),
		refused:  prometheus.NewCounterVec(counter("refused_total", "Batches and connections refused, by reason."), []string{"reason"}),
		gossip:   prometheus.NewCounterVec(counter("gossip_refused_total", "Gossip refused, by reason."), []string{"reason"}),
		joins:    prometheus.NewCounterVec(counter("joins_total", "Tries to join an address, by result."), []string{"result"}),
	}
	if to == nil {
		return m, nil
	}
	var all error
	for _, c := range []prometheus.Collector{
		m.members, m.queued, m.pushed, m.merged, m.onLeave, m.batches, m.took, m.received, m.refused, m.gossip, m.joins,
	} {
		all = errors.Join(all, to.Register(c))
	}
	return m, all
}
