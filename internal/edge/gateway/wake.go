package gateway

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// reach returns the route once it accepts traffic, waking the sandbox if it is paused and this request
// may wake it. The error is a *reply.Reply, or the context's.
func (x *exchange) reach(ctx context.Context) (*route.Entry, error) {
	entry, ok := x.g.cfg.Routes.Lookup(x.ID)
	if !ok {
		return entry, x.g.unknown()
	}
	if !entry.Reachable() {
		return x.await(ctx, entry)
	}
	if !x.mayPass(entry.Access.PublicTraffic) {
		return entry, reply.NoToken
	}
	return entry, nil
}

func (g *Gateway) unknown() *reply.Reply {
	if !g.cfg.Routes.Synced() {
		return reply.NotSynced
	}
	return reply.NotFound
}

// await follows a route until it is reachable.
func (x *exchange) await(ctx context.Context, entry *route.Entry) (*route.Entry, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, x.g.cfg.WakeTimeout, reply.TooSlow)
	defer cancel()
	for woken := false; ; {
		if entry.Reachable() {
			if !x.mayPass(entry.Access.PublicTraffic) {
				return entry, reply.NoToken
			}
			return entry, nil
		}
		var err error
		if woken, err = x.advance(ctx, entry, woken); err != nil {
			return entry, err
		}
		var ok bool
		if entry, ok = x.g.cfg.Routes.Lookup(x.ID); !ok {
			return entry, x.g.unknown()
		}
	}
}

// advance handles a sandbox that is not reachable: it wakes it, at most once per request, or waits for
// a change.
func (x *exchange) advance(ctx context.Context, entry *route.Entry, woken bool) (bool, error) {
	asleep := entry.State == sandbox.Paused || entry.State == sandbox.Pausing
	switch {
	case asleep && (!entry.Wake.OnTraffic || x.g.cfg.Waker == nil || x.isHealthCheck()):
		return woken, reply.NotFound
	case !x.mayPass(entry.Access.PublicTraffic):
		return woken, reply.NoToken
	case asleep && !woken:
		if f := x.mayWake(entry); f != nil {
			return woken, f
		}
		woken, err := x.g.wakes.Wake(ctx, entry)
		x.woken = x.woken || woken
		return woken, err
	}
	select {
	case <-entry.Changed:
		return woken, nil
	case <-x.g.requests.Aborted():
		return woken, reply.InMotion
	case <-ctx.Done():
		return woken, context.Cause(ctx)
	}
}

func (x *exchange) refuse(f *reply.Reply) {
	if (f == reply.NoToken || f == reply.NoWake) && reply.IsPreflight(x.r) {
		x.status = http.StatusNoContent
		reply.AllowRequest(x.w, x.r)
		return
	}
	x.status, x.reason = f.Status, f.Message
	x.closeIfEarly()
	f.Write(x.w, x.r, x.ID)
}

// refuseError sends err if it is meant for the client; otherwise the client is gone.
func (x *exchange) refuseError(err error) {
	if f, ok := errors.AsType[*reply.Reply](err); ok {
		x.refuse(f)
		return
	}
	if x.r.Context().Err() == nil {
		x.g.log.WarnContext(x.r.Context(), "request to sandbox ended oddly", telemetry.Sandbox, x.ID, telemetry.Error, err)
		x.refuse(reply.Silent)
		return
	}
	panic(http.ErrAbortHandler)
}

// enter finds the upstream of the request's epoch, and counts the request there.
func (x *exchange) enter(ctx context.Context) (*route.Entry, *upstream, error) {
	if u := x.begun; u != nil {
		return u.upstream.entry, u.upstream, nil
	}
	for {
		entry, err := x.reach(ctx)
		if err != nil {
			return entry, nil, err
		}
		u := x.g.upstreamOf(entry)
		if !x.counted {
			if after := u.allowance.Take(x.g.rateOf(entry)); after > 0 {
				return entry, nil, reply.TooMany("to this sandbox", after)
			}
			x.counted = true
		}
		switch began := u.traffic.Begin(); {
		case began && x.g.isFull(u):
			u.traffic.Cancel()
			return entry, nil, reply.TooMany("to this sandbox are in progress", time.Second)
		case began:
			return entry, u, nil
		}
		if err := x.awaitHold(ctx, entry, u); err != nil {
			return entry, nil, err
		}
	}
}

// isFull reports whether more requests to a sandbox are in progress than may be.
func (g *Gateway) isFull(u *upstream) bool {
	return g.cfg.SandboxRequests > 0 && u.traffic.Count() > int64(g.cfg.SandboxRequests)
}

// rateOf returns the limit of requests per second to a sandbox; 0: unlimited.
func (g *Gateway) rateOf(entry *route.Entry) float64 {
	if n := entry.Access.RequestsPerSecond; n > 0 {
		return float64(n)
	}
	return g.cfg.SandboxRate
}

// awaitHold waits until a hold has ended, or the route has changed.
func (x *exchange) awaitHold(ctx context.Context, entry *route.Entry, u *upstream) error {
	held := u.traffic.Held()
	if held == nil {
		return nil
	}
	timeout := time.NewTimer(x.g.cfg.WakeTimeout)
	defer timeout.Stop()
	select {
	case <-held:
	case <-entry.Changed:
	case <-timeout.C:
		return reply.InMotion
	case <-x.g.requests.Aborted():
		return reply.InMotion
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}
