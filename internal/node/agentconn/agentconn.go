// Package agentconn reaches the agents of a node's sandboxes: it waits until one responds, tells it of a start or a restore,
// and sends it a configuration. It starts nothing and keeps nothing but idle connections.
package agentconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// minPause is the first pause between two requests to a starting agent.
	minPause = time.Millisecond
	// MaxPause is the longest one.
	MaxPause = 10 * time.Millisecond
	// firstTimeout bounds the first request: a packet sent before the agent listens is lost, and TCP
	// would resend it only after a second. maxTimeout bounds later ones, whose timeout grows: on an
	// overloaded host every response takes long.
	firstTimeout = 50 * time.Millisecond
	maxTimeout   = 2 * time.Second
	// look is the pause between two looks at the output of a starting agent; after some of them, the sandbox may have ended.
	look  = 2 * time.Millisecond
	looks = 25
	// lineTimeout bounds the wait for the line by which an agent says that it serves.
	lineTimeout = 2 * time.Second
)

// Agents reaches the agents of sandboxes. Make it with New.
type Agents struct {
	HTTP *http.Client
	// token is the access token of a sandbox's agents; nil means none.
	token func(sandbox.ID) string
	// timeout bounds the wait for an agent.
	timeout time.Duration
}

// New opens nothing.
func New(token func(sandbox.ID) string, timeout time.Duration) *Agents {
	return &Agents{token: token, timeout: timeout, HTTP: &http.Client{Transport: telemetry.TraceTransport(&http.Transport{
		DialContext:        (&net.Dialer{Timeout: 2 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		DisableCompression: true, MaxIdleConnsPerHost: 4, MaxResponseHeaderBytes: envd.MaxResponseHeader, IdleConnTimeout: 5 * time.Minute,
	})}}
}

// Close closes idle connections.
func (a *Agents) Close() { a.HTTP.CloseIdleConnections() }

// Container is a running container with an agent.
type Container struct {
	ID      sandbox.ID
	Address netip.Addr
	// Sidecar is the name of a container beside the first one of the sandbox; empty for that.
	Sidecar string
	// Alive reports whether the sandbox's kernel runs; Output is what it and the agent have printed.
	Alive  func() bool
	Output func() string
	// Serves reports whether the agent has printed that it serves. It may be wrong: a request follows in any case, and is
	// repeated as needed. Nil: it is not known.
	Serves func() bool
}

// Client returns a client of the agent of a container.
func (a *Agents) Client(c Container) (*envd.Client, error) {
	cfg := a.config(c.Address)
	if a.token != nil {
		cfg.Token = func() string { return a.token(c.ID) }
	}
	client, err := envd.NewClient(cfg)
	if err == nil && c.Sidecar != "" {
		client, err = client.Container(c.Sidecar)
	}
	if err != nil {
		return nil, fmt.Errorf("create agent client: %w", err)
	}
	return client, nil
}

// config is of a client without a token.
func (a *Agents) config(addr netip.Addr) envd.ClientConfig {
	return envd.ClientConfig{HTTP: a.HTTP, BaseURL: "http://" + net.JoinHostPort(addr.String(), strconv.Itoa(envd.Port))}
}

// AwaitHealth waits until the agent of a container that was started responds.
func (a *Agents) AwaitHealth(ctx context.Context, c Container) (*envd.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	awaitLine(ctx, c)
	return a.retry(ctx, c, health)
}

// AwaitStarted waits until the agent responds, and sets its clock.
func (a *Agents) AwaitStarted(ctx context.Context, c Container) error {
	return a.await(ctx, c, "agent start", func(ctx context.Context) error {
		awaitLine(ctx, c)
		_, err := a.retry(ctx, c, initialize)
		return err
	})
}

// AwaitRestored waits until the agent responds, and notifies it of the restore. It sets the clock of an agent
// without that request. An agent prints nothing at a restore.
func (a *Agents) AwaitRestored(ctx context.Context, c Container) error {
	return a.await(ctx, c, "agent restore", func(ctx context.Context) error {
		agent, err := a.retry(ctx, c, health)
		if err != nil {
			return err
		}
		err = agent.Restored(ctx, time.Now())
		if refused, ok := errors.AsType[*envd.Error](err); ok && (refused.Status == http.StatusNotFound || refused.Status == http.StatusUnauthorized) {
			err = initialize(ctx, agent)
		}
		if err != nil {
			return errs.Retryable(fmt.Errorf("notify agent of restore: %w", err))
		}
		return nil
	})
}

func health(ctx context.Context, agent *envd.Client) error { return agent.Health(ctx) }

func initialize(ctx context.Context, agent *envd.Client) error {
	now := time.Now()
	return agent.Init(ctx, envd.InitRequest{Timestamp: &now})
}

// await does something that waits for an agent, in a span.
func (a *Agents) await(ctx context.Context, c Container, span string, do func(ctx context.Context) error) (err error) {
	ctx, end := telemetry.StartSpan(ctx, span, trace.WithSpanKind(trace.SpanKindClient), telemetry.OfSandbox(string(c.ID)))
	defer func() { end(err) }()
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	return do(ctx)
}

// awaitLine waits until the agent has printed that it serves. Without that line, or at the end of the sandbox, it returns too.
func awaitLine(ctx context.Context, c Container) {
	ctx, cancel := context.WithTimeout(ctx, lineTimeout)
	defer cancel()
	for c.Serves != nil && c.Alive() {
		for range looks {
			if c.Serves() || !lifecycle.Sleep(ctx, look) {
				return
			}
		}
	}
}

// retry repeats a request until the agent responds. A response ends it, but for that of a proxy before the agent.
func (a *Agents) retry(ctx context.Context, c Container, request func(context.Context, *envd.Client) error) (*envd.Client, error) {
	agent, err := a.Client(c)
	if err != nil {
		return nil, err
	}
	pause, timeout := minPause, firstTimeout
	for {
		limited, done := context.WithTimeout(ctx, timeout)
		err := request(limited, agent)
		if limited.Err() != nil {
			timeout = min(timeout+timeout/4, maxTimeout)
		}
		done()
		if err == nil {
			return agent, nil
		}
		if refused, ok := errors.AsType[*envd.Error](err); ok && refused.Status != http.StatusBadGateway {
			return nil, errs.Retryable(fmt.Errorf("request to agent: %w", err))
		}
		if !c.Alive() {
			return nil, fmt.Errorf("sandbox exited before its agent responded: %s: %w", c.Output(), errs.ErrUnavailable)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, fmt.Errorf("no response from agent within %s: %w: %s: %w", a.timeout, err, c.Output(), errs.ErrUnavailable)
		}
		pause = min(2*pause, MaxPause)
	}
}

// Configure sends a running agent the configuration that it would read at a start. It omits the time,
// which could make a concurrent request count as late.
func (a *Agents) Configure(ctx context.Context, c Container, cfg *envd.Config) (err error) {
	ctx, end := telemetry.StartSpan(ctx, "agent configure", trace.WithSpanKind(trace.SpanKindClient), telemetry.OfSandbox(string(c.ID)))
	defer func() { end(err) }()
	agent, err := a.Client(c)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	if a.isConfigured(ctx, c, agent, cfg) {
		return nil
	}
	err = agent.Init(ctx, envd.InitRequest{EnvVars: cfg.Env, AccessToken: cfg.AccessToken, Open: cfg.Open})
	if refused, ok := errors.AsType[*envd.Error](err); ok && refused.Status == http.StatusBadRequest {
		return fmt.Errorf("agent: %w: %w", err, errs.ErrInvalid)
	}
	return errs.Retryable(err)
}

// isConfigured reports whether a running agent has the environment and the access of a configuration, as after a
// claim that sent both. It reads the agent, not the journal, which may be behind after a crash.
func (a *Agents) isConfigured(ctx context.Context, c Container, agent *envd.Client, cfg *envd.Config) bool {
	stranger, err := envd.NewClient(a.config(c.Address))
	if err != nil {
		return false
	}
	_, err = stranger.Envs(ctx)
	refused, _ := errors.AsType[*envd.Error](err)
	if cfg.Open && err != nil || !cfg.Open && (refused == nil || refused.Status != http.StatusUnauthorized) {
		return false
	}
	env, err := agent.Envs(ctx)
	for name, value := range cfg.Env { // the agent has more of its own
		if has, ok := env[name]; !ok || has != value {
			return false
		}
	}
	return err == nil
}
