package gateway

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

const (
	// idleLook is the default of Config's.
	idleLook = time.Second
	// idleActions bounds how many idle sandboxes are paused or removed at a time.
	idleActions = 4
	// idleActionTime bounds one such action; requests that arrive meanwhile wait for it.
	idleActionTime = 2 * time.Minute
)

// traffic counts the requests of one epoch and records the last use. It costs a request three atomic
// operations. While it is held, no request begins.
type traffic struct {
	under atomic.Int64                  // in progress; far below zero while held
	last  atomic.Int64                  // end of the last request, by Gateway.clock
	held  atomic.Pointer[chan struct{}] // closed when the hold ends; nil without one
}

const holdMark = math.MinInt64 / 2

// begin counts a request, and reports false while the epoch is held.
func (t *traffic) begin() bool {
	if t.under.Add(1) > 0 {
		return true
	}
	t.under.Add(-1)
	return false
}

func (t *traffic) end(now time.Duration) {
	t.last.Store(int64(now))
	t.under.Add(-1)
}

// hold keeps requests from beginning, if none is in progress and none ended after last. There is at
// most one hold at a time. release must be called.
func (t *traffic) hold(last time.Duration) (release func(), ok bool) {
	done := make(chan struct{})
	if !t.held.CompareAndSwap(nil, &done) {
		return nil, false
	}
	marked := t.under.CompareAndSwap(0, holdMark)
	release = func() {
		if marked {
			t.under.Add(-holdMark)
		}
		t.held.Store(nil)
		close(done)
	}
	if !marked || t.last.Load() > int64(last) {
		release()
		return nil, false
	}
	return release, true
}

// clock is the time since the gateway was made. Unlike the machine's, it does not jump.
func (g *Gateway) clock() time.Duration { return time.Since(g.born) }

// Idle returns since when a sandbox has had no traffic through this gateway, and whether it has some
// now: requests, streams, WebSockets, calls of its agent. The time restarts with each epoch of the
// sandbox, when the gateway first sees it. The zero time stands for a sandbox that cannot be reached.
func (g *Gateway) Idle(id sandbox.ID) (since time.Time, busy bool) {
	entry, ok := g.cfg.Routes.Lookup(id)
	if !ok || !entry.Reachable() {
		return time.Time{}, false
	}
	t := &g.upstreamOf(entry).traffic
	return g.born.Add(time.Duration(t.last.Load())), t.under.Load() > 0
}

// Sleeper executes idle policies; package manager implements it.
type Sleeper interface {
	Pause(ctx context.Context, namespace, id string, keepMemory *bool) error
	Kill(ctx context.Context, namespace, id string) error
}

// WatchIdle pauses or removes sandboxes that had no traffic for the time that their policy sets, until
// ctx ends and all actions have returned. A request that arrives while its sandbox is being paused
// waits, and then wakes it if it may. Failures are retried after the same time again. With several
// gateways, each sees only its own traffic: run it only where all traffic passes.
func (g *Gateway) WatchIdle(ctx context.Context, s Sleeper) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, idleActions)
	tick := time.NewTicker(g.cfg.idleLook)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		for r := range g.cfg.Routes.All() {
			if r.Idle.After <= 0 || r.State != sandbox.Running {
				continue
			}
			p, release, ok := g.holdIdle(&r)
			if !ok {
				continue
			}
			select {
			case slots <- struct{}{}:
			default: // it is still idle at the next check
				release()
				continue
			}
			wg.Go(func() {
				defer func() { <-slots }()
				defer release()
				g.act(ctx, s, &r, p)
			})
		}
	}
}

// holdIdle holds an epoch that has been idle for its time.
func (g *Gateway) holdIdle(r *route.Route) (p *upstream, release func(), ok bool) {
	entry, found := g.cfg.Routes.Lookup(r.ID)
	if !found || entry.State != sandbox.Running {
		return nil, nil, false
	}
	p = g.upstreamOf(entry)
	release, ok = p.traffic.hold(g.clock() - r.Idle.After)
	return p, release, ok
}

// act executes the idle policy of a sandbox. Its epoch is held.
func (g *Gateway) act(ctx context.Context, s Sleeper, r *route.Route, p *upstream) {
	ctx, cancel := context.WithTimeout(ctx, idleActionTime)
	defer cancel()
	action, do := "pause", func() error { return s.Pause(ctx, r.Namespace, string(r.ID), nil) }
	if r.Idle.Shutdown {
		action, do = "shutdown", func() error { return s.Kill(ctx, r.Namespace, string(r.ID)) }
	}
	err := do()
	result := "ok"
	switch {
	case err == nil:
		g.log.InfoContext(ctx, "idle sandbox put to sleep", telemetry.Sandbox, r.ID, "action", action, "after", r.Idle.After)
	case errors.Is(err, errs.ErrConflict) || errors.Is(err, errs.ErrNotFound):
		result = "overtaken" // another client changed it meanwhile
	default:
		result = "failed"
		g.log.WarnContext(ctx, "idle sandbox not put to sleep", telemetry.Sandbox, r.ID, "action", action, telemetry.Error, err)
	}
	g.metrics.idle.WithLabelValues(action, result).Inc()
	p.traffic.last.Store(int64(g.clock()))
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
		if u.traffic.begin() {
			return entry, u, nil
		}
		if err := x.awaitHold(ctx, entry, u); err != nil {
			return entry, nil, err
		}
	}
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
	held := u.traffic.held.Load()
	if held == nil {
		return nil
	}
	timeout := time.NewTimer(x.g.cfg.WakeTimeout)
	defer timeout.Stop()
	select {
	case <-*held:
	case <-entry.Changed:
	case <-timeout.C:
		return reply.InMotion
	case <-x.g.flights.cut:
		return reply.InMotion
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}
