// Package wake resumes paused sandboxes that have traffic: once per sandbox, however many requests wait.
// It does not decide which request may wake a sandbox.
//
// Lock order: Group.mu is not held over a call of the Waker.
package wake

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Waker resumes a paused sandbox. Wake returns when it runs; its error's kind (package errs) decides
// the response to the waiting requests.
type Waker interface {
	Wake(ctx context.Context, id sandbox.ID) error
}

// Group has the wakes in progress. All exported fields are required; it is safe for concurrent use.
type Group struct {
	Waker Waker
	// Timeout bounds one wake.
	Timeout time.Duration
	// Requests waits for the wakes, and aborts them.
	Requests *traffic.Tracker
	Duration prometheus.Observer // in seconds
	Log      *slog.Logger

	mu    sync.Mutex
	calls map[sandbox.ID]*call // +checklocks:mu
}

// call is one wake.
type call struct {
	done chan struct{}
	err  error // set before done is closed
}

// Wake wakes the sandbox, or joins a wake in progress. The wake continues when the request that began
// it is gone. woken is false if the route has changed since it was looked up, for instance because
// another wake just ended. The error is a *reply.Reply, or the context's cause.
func (g *Group) Wake(ctx context.Context, entry *route.Entry) (woken bool, err error) {
	c := g.join(ctx, entry)
	if c == nil {
		return false, nil
	}
	select {
	case <-c.done:
		if c.err != nil {
			return true, replyTo(c.err)
		}
		return true, nil
	case <-ctx.Done():
		return true, context.Cause(ctx)
	}
}

// join returns the wake in progress, or begins one. Nil: the route has changed.
func (g *Group) join(ctx context.Context, entry *route.Entry) *call {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.calls[entry.ID]; c != nil {
		return c
	}
	select {
	case <-entry.Changed:
		return nil
	default:
	}
	c := &call{done: make(chan struct{})}
	if g.calls == nil {
		g.calls = map[sandbox.ID]*call{}
	}
	g.calls[entry.ID] = c
	g.Requests.Join()
	go g.run(context.WithoutCancel(ctx), entry.ID, c) // Requests waits for it
	return c
}

func (g *Group) run(ctx context.Context, id sandbox.ID, c *call) {
	defer g.Requests.End()
	ctx, cancel := context.WithTimeout(ctx, g.Timeout)
	defer cancel()
	go func() { // ends with ctx
		select {
		case <-g.Requests.Aborted():
			cancel()
		case <-ctx.Done():
		}
	}()
	start := time.Now()
	c.err = errors.New("wake panicked")
	defer func() {
		if cause := recover(); cause != nil {
			g.Log.ErrorContext(ctx, "wake panicked", telemetry.Sandbox, id, telemetry.Reason, cause)
		}
		g.mu.Lock()
		delete(g.calls, id)
		g.mu.Unlock()
		close(c.done)
	}()
	c.err = g.Waker.Wake(ctx, id)
	g.Duration.Observe(time.Since(start).Seconds())
	if c.err != nil {
		g.Log.WarnContext(ctx, "wake by traffic refused or failed", telemetry.Sandbox, id, telemetry.Error, c.err)
	}
}

// replies maps the kind of a wake's error to a local reply; nil is any other kind.
var replies = map[error]*reply.Reply{
	errs.ErrNotFound:        reply.NotFound,
	errs.ErrForbidden:       reply.NoWake,
	errs.ErrUnauthenticated: reply.NoWake,
	errs.ErrConflict:        reply.InMotion,
	errs.ErrTimeout:         reply.TooSlow,
	errs.ErrExhausted:       reply.OverLimit,
	nil:                     reply.WakeFailed,
}

// replyTo returns the local reply to a failed wake, with the part of the error that is meant for
// users.
func replyTo(err error) *reply.Reply {
	f, ok := replies[errs.Kind(err)]
	switch {
	case !ok:
		f = reply.WakeFailed
	case f == reply.NotFound:
		return f // clients compare its text
	}
	if reason, public := errs.PublicMessage(err); public {
		return f.Because(reason)
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errs.ErrTimeout) {
		return reply.TooSlow
	}
	return f
}
