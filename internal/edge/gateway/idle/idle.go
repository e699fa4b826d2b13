// Package idle pauses or removes sandboxes without traffic, as their policies say. It counts no traffic,
// and starts nothing.
package idle

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

const (
	// maxActions bounds how many idle sandboxes are paused or removed at a time.
	maxActions = 4
	// actionTimeout bounds one such action; requests that arrive meanwhile wait for it.
	actionTimeout = 2 * time.Minute
	// lowAfter is the time without traffic after which a sandbox is paused while memory is low.
	lowAfter = 10 * time.Second
)

// Suspender executes idle policies.
type Suspender interface {
	PauseIdle(ctx context.Context, namespace, id string) error
	Kill(ctx context.Context, namespace, id string) error
}

// Policy executes the idle policies of all sandboxes. All fields but MemoryLow are required.
type Policy struct {
	Suspender Suspender
	// Interval between two checks.
	Interval time.Duration
	Routes   func() iter.Seq[route.Route]
	// Traffic returns the counter of a sandbox that runs, else nil.
	Traffic func(id sandbox.ID) *traffic.Counter
	// MemoryLow reports whether memory is low. Then sandboxes that an idle policy pauses, and that traffic wakes, are paused after
	// ten seconds, those first that have been idle for longest. Nil: never.
	MemoryLow func() bool
	// Clock is that of the counters.
	Clock func() time.Duration
	// Actions counts by action and result.
	Actions *prometheus.CounterVec
	Log     *slog.Logger
}

// Watch pauses or removes sandboxes that had no traffic for the time that their policy sets, until ctx
// ends and all actions have returned. Failures are retried after the same time again.
func (p *Policy) Watch(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxActions)
	tick := time.NewTicker(p.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		for _, x := range p.idle() {
			release, ok := x.traffic.Hold(p.Clock() - x.after)
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
				p.act(ctx, &x)
				x.traffic.Touch(p.Clock())
			})
		}
	}
}

// candidate is a sandbox with an idle policy.
type candidate struct {
	route   route.Route
	traffic *traffic.Counter
	last    time.Duration // when it last had traffic
	after   time.Duration // without traffic, it is paused or removed
}

// idle returns the running sandboxes with an idle policy that may have had no traffic for long enough, those first that have been idle
// for longest.
func (p *Policy) idle() (all []candidate) {
	low, now := p.MemoryLow != nil && p.MemoryLow(), p.Clock()
	for r := range p.Routes() {
		if r.Idle.After <= 0 || r.State != sandbox.Running {
			continue
		}
		x := candidate{route: r, traffic: p.Traffic(r.ID), after: r.Idle.After}
		if low && r.Wake.OnTraffic && !r.Idle.Shutdown {
			x.after = min(x.after, lowAfter)
		}
		if x.traffic == nil {
			continue
		}
		if x.last, _ = x.traffic.Idle(); now-x.last >= x.after {
			all = append(all, x)
		}
	}
	slices.SortFunc(all, func(a, b candidate) int { return cmp.Compare(a.last, b.last) })
	return all
}

// act executes the idle policy of a sandbox. Its traffic is held.
func (p *Policy) act(ctx context.Context, x *candidate) {
	r := &x.route
	ctx, cancel := context.WithTimeout(ctx, actionTimeout)
	defer cancel()
	action, do := "pause", func() error { return p.Suspender.PauseIdle(ctx, r.Namespace, string(r.ID)) }
	if r.Idle.Shutdown {
		action, do = "shutdown", func() error { return p.Suspender.Kill(ctx, r.Namespace, string(r.ID)) }
	}
	err := do()
	result := "ok"
	switch {
	case err == nil:
		p.Log.InfoContext(ctx, "idle policy executed", telemetry.Sandbox, r.ID, "action", action, "after", x.after)
	case errors.Is(err, errs.ErrConflict) || errors.Is(err, errs.ErrNotFound):
		result = "overtaken" // another client changed it meanwhile
	default:
		result = "failed"
		p.Log.WarnContext(ctx, "idle policy failed", telemetry.Sandbox, r.ID, "action", action, telemetry.Error, err)
	}
	p.Actions.WithLabelValues(action, result).Inc()
}
