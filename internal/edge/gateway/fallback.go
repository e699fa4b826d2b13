package gateway

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync/atomic"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/accesslog"
	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/edge/gateway/fastpath"
	"github.com/barchan-dev/barchan/internal/edge/gateway/server"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// startFastPath moves the connection of a request to the fast path, which then serves the request.
func (g *Gateway) startFastPath(w http.ResponseWriter, r *http.Request, t *target.Target) bool {
	client := server.ConnOf(r)
	if g.fast == nil || client == nil || t.Name != "" || t.Prefix != "" || !g.isWarm(t) || client.MustStay() {
		return false
	}
	to := fastpath.Target{ID: t.ID, Port: t.Port, Host: t.Host}
	return g.fast.Start(context.WithoutCancel(r.Context()), r, to, client.Fallbacks, func() (net.Conn, []byte, error) {
		return server.Hijack(http.NewResponseController(w), r)
	})
}

// isWarm reports whether a target has sent a response in its epoch. A panic here recurs on the main
// path.
func (g *Gateway) isWarm(t *target.Target) (warm bool) {
	defer func() {
		if recover() != nil {
			warm = false
		}
	}()
	entry, ok := g.cfg.Routes.Lookup(t.ID)
	return ok && entry.Reachable() && g.upstreamOf(entry).HasResponded(t.Port)
}

// inflight is a request that the fast path admitted and the main path completes.
type inflight struct {
	*fastpath.Inflight
	g        *Gateway
	upstream *upstream
}

func (u *inflight) closeConn() {
	if u.Conn != nil {
		_ = u.Conn.Close()
	}
}

// drop ends a request that is not read again.
func (u *inflight) drop() {
	u.closeConn()
	u.g.endFast(u.upstream)
	u.g.metrics.answered(0)
}

// endFast ends the counts that Admit began.
func (g *Gateway) endFast(u *upstream) {
	u.traffic.End(g.clock())
	g.metrics.inFlight.Dec()
	g.requests.End()
}

// admitted returns a request that the fast path admitted as this package needs it.
func (g *Gateway) admitted(i *fastpath.Inflight) *inflight {
	return &inflight{Inflight: i, g: g, upstream: i.Upstream.(*upstream)}
}

// takeUp returns the request if the fast path admitted it, else nil.
func (g *Gateway) takeUp(r *http.Request, t *target.Target) *inflight {
	i := server.ConnOf(r).TakeInflight()
	if i == nil {
		return nil
	}
	u := g.admitted(i)
	if u.Target.ID != t.ID || u.Target.Port != t.Port {
		u.drop()
		panic(http.ErrAbortHandler) // the two parsers disagree: never forward this
	}
	return u
}

// resume continues a request that the fast path admitted.
func (x *exchange) resume(u *inflight) {
	x.begun, x.started, x.counted = u, u.Started, true
	if x.bodySent = u.Conn != nil; x.bodySent {
		n, _ := io.Copy(io.Discard, x.r.Body) // the fast path has read the whole body
		x.received.Store(n)
	}
}

// sentTransport returns a transport for the response of a request that was sent.
func (u *inflight) sentTransport() *http.Transport {
	t := u.upstream.NewTransport()
	t.DisableKeepAlives = true
	var used atomic.Bool
	t.DialContext = func(context.Context, string, string) (net.Conn, error) {
		if used.Swap(true) {
			return nil, endpoint.ErrOver
		}
		c := u.Conn.(*endpoint.Conn)
		c.Resume(u.Ahead)
		return c, nil
	}
	return t
}

// mainPath is the gateway as the fast path sees it.
type mainPath struct{ *Gateway }

// Bind implements fastpath.Gateway.
func (m mainPath) Bind(host, sandboxID, sandboxPort string) (fastpath.Target, bool) {
	r := &http.Request{Host: host, Header: http.Header{}, URL: &url.URL{Path: "/"}}
	if sandboxID != "" {
		r.Header.Set(envd.HeaderSandboxID, sandboxID)
	}
	if sandboxPort != "" {
		r.Header.Set(envd.HeaderSandboxPort, sandboxPort)
	}
	t, kind, err := target.Of(r, m.domains, m.bySignature)
	if t.Host == "" {
		t.Host = host
	}
	return fastpath.Target{ID: t.ID, Port: t.Port, Host: t.Host}, err == nil && kind == target.ForSandbox && t.Name == "" && t.Prefix == ""
}

// Admit implements fastpath.Gateway.
func (m mainPath) Admit(x *fastpath.Exchange) (fastpath.Upstream, bool) {
	entry, ok := m.cfg.Routes.Lookup(x.Target.ID)
	if !ok || !m.mayPassFast(entry, x) {
		return nil, false
	}
	u := m.upstreamOf(entry)
	if !u.HasResponded(x.Target.Port) || !m.requests.Begin() {
		return nil, false
	}
	if !u.traffic.Begin() {
		m.requests.End()
		return nil, false
	}
	if m.isFull(u) || u.allowance.Take(m.rateOf(entry)) > 0 {
		u.traffic.Cancel()
		m.requests.End()
		return nil, false
	}
	m.metrics.inFlight.Inc()
	return u, true
}

// mayPassFast reports whether a request may be forwarded at once and unchanged.
func (m mainPath) mayPassFast(entry *route.Entry, x *fastpath.Exchange) bool {
	if !entry.Reachable() || entry.Access.MaskRequestHost != "" {
		return false
	}
	if x.Target.Port == envd.Port {
		return !envd.IsInternal(x.Path())
	}
	if entry.Access.PublicTraffic {
		return true
	}
	token, shown := x.TrafficToken()
	return shown && sandbox.EqualToken(token, m.cfg.Tokens.Traffic(x.Target.ID))
}

// Done implements fastpath.Gateway.
func (m mainPath) Done(ctx context.Context, x *fastpath.Exchange) {
	defer m.endFast(x.Upstream.(*upstream)) // nothing is logged after a drain
	m.metrics.answered(x.Status)
	if x.Status != 0 {
		m.metrics.firstByte.Observe(x.FirstByte.Seconds())
		if x.Target.Port == envd.Port && x.HasPath(processpb.ProcessStartProcedure) {
			m.metrics.exec.Observe(x.FirstByte.Seconds())
		}
	}
	if !m.access.Enabled(ctx, x.Target.Port, x.Method(), x.Path()) {
		return
	}
	m.access.Write(ctx, &accesslog.Record{
		Sandbox: x.Target.ID, Port: x.Target.Port, Method: x.Method(), Host: x.Host(), Path: x.Path(), Proto: "HTTP/1.1",
		Remote: x.Remote, Status: x.Status, Bytes: int64(x.Bytes), Received: int64(x.Received),
		FirstByte: x.FirstByte, Started: x.Started, UserAgent: x.UserAgent(),
	})
}

// Fallback implements fastpath.Gateway.
func (m mainPath) Fallback(c *fastpath.Connection) {
	if !m.back.Resume(c) && c.Inflight != nil {
		m.admitted(c.Inflight).drop()
	}
}

// newBack makes the server of connections that fell back.
func (g *Gateway) newBack() *server.Server {
	return g.Server(nil).OnUnread(func(i *fastpath.Inflight) { g.admitted(i).drop() })
}
