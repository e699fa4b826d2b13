package gateway

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// wakes are the wakes in progress: one per sandbox, however many requests wait for it.
type wakes struct {
	mu    sync.Mutex
	calls map[sandbox.ID]*wakeCall // +checklocks:mu
}

type wakeCall struct {
	done chan struct{}
	err  error // set before done is closed
}

// wakeRefusals maps the kind of a wake's error to a local reply; nil is any other kind.
var wakeRefusals = map[error]*reply.Reply{
	errs.ErrNotFound:        reply.NotFound,
	errs.ErrForbidden:       reply.NoWake,
	errs.ErrUnauthenticated: reply.NoWake,
	errs.ErrConflict:        reply.InMotion,
	errs.ErrTimeout:         reply.TooSlow,
	errs.ErrExhausted:       reply.OverLimit,
	nil:                     reply.WakeFailed,
}

// refusalOf returns the local reply to a failed wake, with the part of the error that is meant for
// users.
func refusalOf(err error) *reply.Reply {
	f, ok := wakeRefusals[errs.Kind(err)]
	switch {
	case !ok:
		f = reply.WakeFailed
	case f == reply.NotFound:
		return f // clients compare its text
	}
	if reason, told := errs.PublicMessage(err); told {
		return f.Because(reason)
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errs.ErrTimeout) {
		return reply.TooSlow
	}
	return f
}

// wake wakes the sandbox, or joins a wake in progress. The wake continues when the request that began
// it is gone. woken is false if the route has changed since it was looked up, for instance because
// another wake just ended. The error is a *localReply, or the context's cause.
func (g *Gateway) wake(ctx context.Context, entry *route.Entry) (woken bool, err error) {
	call := g.joinWake(ctx, entry)
	if call == nil {
		return false, nil
	}
	select {
	case <-call.done:
		if call.err != nil {
			return true, refusalOf(call.err)
		}
		return true, nil
	case <-ctx.Done():
		return true, context.Cause(ctx)
	}
}

// joinWake returns the wake in progress, or begins one. Nil: the route has changed.
func (g *Gateway) joinWake(ctx context.Context, entry *route.Entry) *wakeCall {
	g.wakes.mu.Lock()
	defer g.wakes.mu.Unlock()
	if call := g.wakes.calls[entry.ID]; call != nil {
		return call
	}
	select {
	case <-entry.Changed:
		return nil
	default:
	}
	call := &wakeCall{done: make(chan struct{})}
	g.wakes.calls[entry.ID] = call
	g.flights.join()
	go g.runWake(context.WithoutCancel(ctx), entry.ID, call) // the tracker waits for it
	return call
}

func (g *Gateway) runWake(ctx context.Context, id sandbox.ID, call *wakeCall) {
	defer g.flights.end()
	ctx, cancel := context.WithTimeout(ctx, g.cfg.WakeTimeout)
	defer cancel()
	finished := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-g.flights.cut:
			cancel()
		case <-finished:
		}
	})
	defer wg.Wait()
	defer close(finished)
	start := time.Now()
	call.err = errors.New("wake panicked")
	defer func() {
		if cause := recover(); cause != nil {
			g.log.ErrorContext(ctx, "wake panicked", telemetry.Sandbox, id, telemetry.Reason, cause)
		}
		g.wakes.mu.Lock()
		delete(g.wakes.calls, id)
		g.wakes.mu.Unlock()
		close(call.done)
	}()
	call.err = g.cfg.Waker.Wake(ctx, id)
	g.metrics.wake.Observe(time.Since(start).Seconds())
	if call.err != nil {
		g.log.WarnContext(ctx, "wake by traffic refused or failed", telemetry.Sandbox, id, telemetry.Error, call.err)
	}
}

// reach returns the route once it accepts traffic, waking the sandbox if it is paused and this request
// may wake it. The error is a *localReply, or the context's.
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
	case asleep && (!entry.Wake.OnTraffic || x.g.cfg.Waker == nil || x.asksWhetherItRuns()):
		return woken, reply.NotFound
	case !x.mayPass(entry.Access.PublicTraffic):
		return woken, reply.NoToken
	case asleep && !woken:
		if f := x.mayWake(entry); f != nil {
			return woken, f
		}
		woken, err := x.g.wake(ctx, entry)
		x.woken = x.woken || woken
		return woken, err
	}
	select {
	case <-entry.Changed:
		return woken, nil
	case <-x.g.flights.cut:
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
