package gateway

import (
	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/edge/gateway/ratelimit"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// upstream is one epoch of a sandbox as the gateway counts it: its connections, requests and rate. It is removed when the
// epoch ends.
type upstream struct {
	*endpoint.Endpoint
	entry *route.Entry // the first entry of the epoch

	traffic   traffic.Counter
	allowance ratelimit.Limiter
}

// upstreamOf returns the upstream of an entry's epoch.
func (g *Gateway) upstreamOf(e *route.Entry) *upstream {
	if u, ok := g.upstreams.Load(e.Epoch); ok {
		return u.(*upstream)
	}
	id := e.ID
	u := &upstream{entry: e, Endpoint: endpoint.New(&g.endpoints, e, func() string { return g.cfg.Tokens.Agent(id) })}
	u.traffic.Touch(g.clock())
	if other, loaded := g.upstreams.LoadOrStore(e.Epoch, u); loaded {
		return other.(*upstream)
	}
	e.Epoch.OnEnd(func() {
		g.upstreams.Delete(u.Epoch)
		u.Close()
	})
	return u
}
