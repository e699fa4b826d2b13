package gateway

import (
	"context"
	"net/http"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Visit is a use of a sandbox by another protocol than HTTP, in one epoch. Until its end it counts as an open request: for
// idle policies, and for Drain.
type Visit struct {
	g   *Gateway
	u   *upstream
	end sync.Once
}

// Visit begins a use of a sandbox by a client that has shown to own it. A paused sandbox that traffic may wake is woken. The error
// is a *reply.Reply, or the context's cause.
func (g *Gateway) Visit(ctx context.Context, id sandbox.ID) (*Visit, error) {
	if !g.requests.Begin() {
		return nil, &reply.Reply{Status: http.StatusServiceUnavailable, Message: "The gateway is shutting down", RetryAfter: 1}
	}
	x := &exchange{g: g, Target: target.Target{ID: id}, owner: true}
	_, u, err := x.enter(ctx)
	if err != nil {
		g.requests.End()
		return nil, err
	}
	g.metrics.inFlight.Inc()
	return &Visit{g: g, u: u}, nil
}

// End ends the visit; connections to the sandbox stay open.
func (v *Visit) End() {
	v.end.Do(func() {
		v.u.traffic.End(v.g.clock())
		v.g.metrics.inFlight.Dec()
		v.g.requests.End()
	})
}

// Epoch ends with the sandbox's run; connections to it are closed then.
func (v *Visit) Epoch() *route.Epoch { return v.u.Epoch }

// Aborted is closed when a shutdown waits no longer.
func (v *Visit) Aborted() <-chan struct{} { return v.g.requests.Aborted() }

// Dial opens a connection to a port of the sandbox, its loopback included.
func (v *Visit) Dial(ctx context.Context, port uint16) (*endpoint.Conn, error) {
	return v.u.Dial(ctx, port)
}

// Agent returns a client of the agent as a user of the sandbox; empty: the default one.
func (v *Visit) Agent(user string) (*envd.Client, error) {
	return envd.NewClient(envd.ClientConfig{
		HTTP: &http.Client{Transport: v.u.Transport(envd.Port, false)}, BaseURL: "http://" + v.u.At(envd.Port), Token: v.Token, User: user,
	})
}

// Token returns the agent's token.
func (v *Visit) Token() string { return v.g.cfg.Tokens.Agent(v.u.entry.ID) }
