package sshd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
)

// run serves the channels of a connection to its end.
func (c *conn) run(ctx context.Context, chans <-chan ssh.NewChannel, reqs <-chan *ssh.Request) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer c.wg.Wait()
	defer cancel(errGone)
	defer c.close()
	c.s.metrics.open.Inc()
	defer c.s.metrics.open.Dec()
	from, start := c.ssh.RemoteAddr().String(), c.s.clock()
	c.s.log.InfoContext(ctx, "SSH connection opened", telemetry.Sandbox, c.login.id, telemetry.Address, from, telemetry.Method, c.login.method)
	defer func() {
		c.s.log.InfoContext(ctx, "SSH connection closed", telemetry.Sandbox, c.login.id, telemetry.Address, from, telemetry.Duration, c.s.clock()-start)
	}()
	c.wg.Go(func() { ssh.DiscardRequests(reqs) }) // refuses remote forwarding; a client's keepalives need any answer
	c.wg.Go(func() { c.watchRoute(ctx) })
	c.wg.Go(func() { c.keepAlive(ctx) })
	for offer := range chans {
		c.channels.Add(1)
		c.wg.Go(func() {
			defer c.left()
			c.serve(ctx, offer)
		})
	}
}

// left counts the end of a channel.
func (c *conn) left() {
	c.idle.Store(int64(c.s.clock()))
	if c.channels.Add(-1) == 0 && c.s.isStopping() {
		c.close()
	}
}

// errGone is the cause of the end of what a connection's end ends.
var errGone = errors.New("the client has gone")

// serve serves one channel.
func (c *conn) serve(ctx context.Context, offer ssh.NewChannel) {
	kind, run := c.handler(offer)
	switch {
	case run == nil:
		c.reject(offer, "other", ssh.UnknownChannelType, fmt.Sprintf("channels of type %q are not served", offer.ChannelType()))
	case c.channels.Load() > maxChannels:
		c.reject(offer, kind, ssh.ResourceShortage, fmt.Sprintf("a connection may have %d channels", maxChannels))
	case !c.login.allowed(ctx):
		c.reject(offer, kind, ssh.Prohibited, "the key was revoked, or the sandbox was removed")
	default:
		run(ctx, offer)
	}
}

func (c *conn) handler(offer ssh.NewChannel) (kind string, run func(context.Context, ssh.NewChannel)) {
	switch offer.ChannelType() {
	case "session":
		return "session", c.serveSession
	case "direct-tcpip":
		return "port", c.servePort
	case "direct-streamlocal@openssh.com":
		return "socket", c.serveSocket
	default:
		return "other", nil
	}
}

func (c *conn) reject(offer ssh.NewChannel, kind string, reason ssh.RejectionReason, text string) {
	c.s.metrics.channels.WithLabelValues(kind, "rejected").Inc()
	_ = offer.Reject(reason, text) // fails if the client has gone
}

// visit begins a use of the sandbox. The context ends with the sandbox's run, and with the connection.
func (c *conn) visit(ctx context.Context) (*gateway.Visit, context.Context, context.CancelCauseFunc, error) {
	v, err := c.s.cfg.Gateway.Visit(ctx, c.login.id)
	if err != nil {
		return nil, nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() { // ends with ctx
		select {
		case <-v.Epoch().Done():
			cancel(errEnded)
		case <-v.Aborted():
			cancel(errStopping)
		case <-ctx.Done():
		}
	}()
	return v, ctx, cancel, nil
}

var (
	errEnded    = errors.New("the sandbox was paused or removed")
	errStopping = errors.New("the server is shutting down")
)

// sentence returns what a client reads of an error.
func (c *conn) sentence(err error) string {
	if f, ok := errors.AsType[*reply.Reply](err); ok {
		if f != reply.NotFound {
			return f.Message
		}
		if entry, ok := c.s.cfg.Routes.Lookup(c.login.id); ok && entry.Asleep() {
			return fmt.Sprintf("the sandbox is paused, and a connection does not wake it; resume it with: barchan resume %s", c.login.id)
		}
		return "the sandbox was removed"
	}
	if text, public := errs.PublicMessage(err); public {
		return text
	}
	for _, known := range []error{errEnded, errStopping, errIdle} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	return "the sandbox did not answer; try again"
}

// watchRoute closes the connection once the sandbox is removed. Its channels end by themselves and have a moment to say so.
func (c *conn) watchRoute(ctx context.Context) {
	for {
		entry, ok := c.s.cfg.Routes.Lookup(c.login.id)
		if !ok {
			break
		}
		select {
		case <-entry.Changed:
		case <-ctx.Done():
			return
		}
	}
	timer := time.NewTimer(farewellTime)
	defer timer.Stop()
	tick := time.NewTicker(farewellTime / 50)
	defer tick.Stop()
	for c.channels.Load() > 0 {
		select {
		case <-tick.C:
			continue
		case <-timer.C:
		case <-ctx.Done():
		}
		break
	}
	c.close()
}

// farewellTime is how long the channels of a removed sandbox may take to end.
const farewellTime = time.Second

// keepAlive closes the connection if the client does not answer, or has no channel for too long.
func (c *conn) keepAlive(ctx context.Context) {
	tick := time.NewTicker(c.s.cfg.Keepalive)
	defer tick.Stop()
	answered, missed := make(chan struct{}, 1), 0
	answered <- struct{}{}
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if c.channels.Load() == 0 && c.s.clock()-time.Duration(c.idle.Load()) >= c.s.cfg.Idle {
			c.close()
			return
		}
		select {
		case <-answered:
			missed = 0
			c.wg.Go(func() {
				if _, _, err := c.ssh.SendRequest("keepalive@openssh.com", true, nil); err == nil {
					answered <- struct{}{}
				}
			})
		default:
			if missed++; missed == 3 {
				c.close()
				return
			}
		}
	}
}
