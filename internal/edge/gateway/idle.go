package gateway

import (
	"context"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/idle"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
)

// clock is the time since the gateway was made. Unlike the machine's, it does not jump.
func (g *Gateway) clock() time.Duration { return time.Since(g.born) }

// WatchIdle pauses or removes sandboxes that had no traffic for the time that their policy sets, until
// ctx ends and all actions have returned. A request that arrives while its sandbox is being paused
// waits, and then wakes it if it may. With several gateways, each sees only its own traffic: run it only
// where all traffic passes.
func (g *Gateway) WatchIdle(ctx context.Context, s idle.Suspender) error {
	p := idle.Policy{
		Suspender: s, Interval: g.cfg.idleInterval, Routes: g.cfg.Routes.All, Clock: g.clock, Actions: g.metrics.idle, Log: g.log,
		Traffic: g.trafficOf, MemoryLow: g.cfg.MemoryLow,
	}
	return p.Watch(ctx)
}

// trafficOf returns the counter of a sandbox that runs, else nil.
func (g *Gateway) trafficOf(id sandbox.ID) *traffic.Counter {
	entry, ok := g.cfg.Routes.Lookup(id)
	if !ok || entry.State != sandbox.Running {
		return nil
	}
	return &g.upstreamOf(entry).traffic
}
