// Package agentclient reaches the agents of sandboxes by the sandboxes' addresses. Claims use the connections of package connpool. It
// decides nothing about a sandbox, retries nothing but a kept connection that the agent had closed, and
// keeps no state of an agent.
//
// With a Verifier, an agent gets no request, and so no token, on a connection before it has proved there which sandbox
// it is.
package agentclient

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"go.opentelemetry.io/otel/trace"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/agentclient/connpool"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// answerTimeout bounds what an agent is asked for a client's request: one that a tenant has replaced may be silent.
const answerTimeout = 5 * time.Second

// Config is what New needs.
type Config struct {
	// Tokens are those of the agents. Required.
	Tokens *sandbox.Tokens
	// Dial reaches an agent by its address; nil is TCP from here.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Verifier nil: an address leads to its sandbox.
	Verifier Verifier
	// AnswerTimeout bounds Stats, StatsHistory and Logs. Default 5 s.
	AnswerTimeout time.Duration
}

// Verifier verifies which sandbox is at the other end of a new connection to an agent; identity.Verifier implements it.
type Verifier interface {
	Verify(ctx context.Context, agent net.Conn, id sandbox.ID) error
	// VerifyHash accepts an agent that does not know its token yet.
	VerifyHash(ctx context.Context, agent net.Conn, id sandbox.ID) error
}

// Client sends requests to agents. Its Pool keeps connections to ready members while it runs. It is safe for concurrent use.
type Client struct {
	*connpool.Pool
	tokens    *sandbox.Tokens
	dial      func(ctx context.Context, network, address string) (net.Conn, error)
	verifier  Verifier // nil: none
	transport *http.Transport
	answerIn  time.Duration
}

// destination is where a request goes; also the key of its context value.
type destination struct {
	id sandbox.ID
	// tokenless: the agent may not know its token yet.
	tokenless bool
}

// sender sends requests to the agent of one sandbox.
type sender struct {
	client *Client
	to     destination
}

// RoundTrip implements http.RoundTripper.
func (s sender) RoundTrip(req *http.Request) (*http.Response, error) {
	return s.client.transport.RoundTrip(req.WithContext(context.WithValue(req.Context(), destination{}, s.to)))
}

// New opens nothing.
func New(cfg Config) *Client {
	c := &Client{
		tokens: cfg.Tokens, dial: cfg.Dial, verifier: cfg.Verifier, answerIn: cmp.Or(cfg.AnswerTimeout, answerTimeout),
	}
	c.Pool = connpool.New(c.poolConfig())
	if c.dial == nil {
		c.dial = (&net.Dialer{Timeout: time.Second}).DialContext
	}
	c.transport = &http.Transport{
		DialContext: c.connect, DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: envd.MaxResponseHeader,
	}
	return c
}

func (c *Client) poolConfig() connpool.Config {
	return connpool.Config{Open: c.dialAgent, Ask: health, Opened: c.prewarmProcess}
}

// Bind sends a request to the agent of a sandbox. ctx must have a deadline. An agent that does not know its token yet
// is accepted if the request has the token.
func (c *Client) Bind(ctx context.Context, s *agents.Sandbox, req envd.InitRequest) (err error) {
	to := destination{id: sandbox.IDOf(s.UID), tokenless: req.AccessToken != ""}
	ctx, end := telemetry.StartSpan(ctx, "agent init", trace.WithSpanKind(trace.SpanKindClient), telemetry.OfSandbox(string(to.id)))
	defer func() { end(err) }()
	c.AwaitWoken(ctx, to.id)
	if conn := c.Take(to.id); conn != nil {
		agent, err := c.agentOver(overConn{conn}, s, "")
		if err == nil {
			err = agent.Init(ctx, req)
		}
		if err == nil {
			c.Put(s, conn)
			return nil
		}
		_ = conn.Close() // the agent may have closed it; the request is sent on a new one
	}
	agent, err := c.agentAs(s, to, "")
	if err != nil {
		return fmt.Errorf("client of the agent of sandbox %s: %w", to.id, err)
	}
	if err := agent.Init(ctx, req); err != nil {
		return fmt.Errorf("bind the agent of sandbox %s: %w: %w", to.id, errs.ErrUnavailable, err)
	}
	return nil
}

// Stats returns what a running sandbox uses now. Errors are those of AnswerError.
func (c *Client) Stats(ctx context.Context, s *agents.Sandbox) (m envd.Metrics, err error) {
	err = c.ask(ctx, s, func(ctx context.Context, agent *envd.Client) error {
		m, err = agent.Metrics(ctx)
		return err
	})
	return m, err
}

// StatsHistory returns what a running sandbox has used since a time in the last hour, oldest first, and last what it uses now. From an
// agent that keeps no history it returns the last alone. Errors are those of AnswerError.
func (c *Client) StatsHistory(ctx context.Context, s *agents.Sandbox, since time.Time) (all []envd.Metrics, err error) {
	err = c.ask(ctx, s, func(ctx context.Context, agent *envd.Client) error {
		history, err := agent.MetricsHistory(ctx, since)
		if answer, refused := errors.AsType[*envd.Error](err); err != nil && (!refused || answer.Status != http.StatusNotFound) {
			return err
		}
		now, err := agent.Metrics(ctx)
		if err == nil {
			all = append(history, now)
		}
		return err
	})
	return all, err
}

// Logs returns the log lines of a container, the first one if empty, that are not older than since, oldest first. Errors are those of
// AnswerError.
func (c *Client) Logs(ctx context.Context, s *agents.Sandbox, container string, since time.Time) (lines []envd.LogLine, err error) {
	err = c.ask(ctx, s, func(ctx context.Context, agent *envd.Client) error {
		if container != "" {
			var err error
			if agent, err = agent.Container(container); err != nil {
				return err
			}
		}
		return agent.Logs(ctx, "", false, func(l envd.LogLine) error {
			if !l.Timestamp.Before(since) {
				lines = append(lines, l)
			}
			return nil
		})
	})
	return lines, err
}

// ask has a question end in time, and gives its error a kind.
func (c *Client) ask(ctx context.Context, s *agents.Sandbox, question func(ctx context.Context, agent *envd.Client) error) error {
	agent, err := c.Agent(s)
	if err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, c.answerIn)
	defer cancel()
	err = question(bounded, agent)
	if ctx.Err() != nil {
		return err
	}
	return AnswerError(err)
}

// AnswerError gives an error of a call to an agent a kind, since a tenant may have replaced the agent: errs.ErrTimeout for a silent one,
// errs.ErrUnavailable where the agent says so, errs.ErrBadGateway for all else. The end of the caller's own context is not for it.
func AnswerError(err error) error {
	answer := envd.ErrorOf(err)
	switch {
	case err == nil || errs.Kind(err) != nil:
		return err
	case errors.Is(err, context.DeadlineExceeded):
		return errs.Public(fmt.Errorf("%w: %w", errs.ErrTimeout, err), "the sandbox's agent did not answer in time")
	case answer != nil && answer.Status == http.StatusServiceUnavailable: // restored from a checkpoint meanwhile
		return fmt.Errorf("%w: %w", errs.ErrUnavailable, err)
	}
	return fmt.Errorf("%w: %w", errs.ErrBadGateway, err)
}

// Agent returns a client of a sandbox's agent. A sandbox without an address is an errs.ErrUnavailable.
func (c *Client) Agent(s *agents.Sandbox) (*envd.Client, error) {
	return c.AgentAs(s, "")
}

// AgentAs returns a client whose programs run as a user of the sandbox; empty: the agent's default.
func (c *Client) AgentAs(s *agents.Sandbox, user string) (*envd.Client, error) {
	return c.agentAs(s, destination{id: sandbox.IDOf(s.UID)}, user)
}

func (c *Client) agentAs(s *agents.Sandbox, to destination, user string) (*envd.Client, error) {
	return c.agentOver(sender{c, to}, s, user)
}

func (c *Client) agentOver(transport http.RoundTripper, s *agents.Sandbox, user string) (*envd.Client, error) {
	id := sandbox.IDOf(s.UID)
	if len(s.Status.PodIPs) == 0 {
		return nil, fmt.Errorf("sandbox %s has no address: %w", id, errs.ErrUnavailable)
	}
	return envd.NewClient(envd.ClientConfig{
		HTTP: &http.Client{Transport: telemetry.TraceTransport(transport)}, BaseURL: agentURL(s), User: user, Token: func() string { return c.tokens.Agent(id) },
	})
}

func agentURL(s *agents.Sandbox) string { return "http://" + agentAddress(s) }

func agentAddress(s *agents.Sandbox) string {
	return net.JoinHostPort(s.Status.PodIPs[0], strconv.Itoa(envd.Port))
}

func (c *Client) connect(ctx context.Context, network, address string) (net.Conn, error) {
	return c.dialVerified(ctx, network, address, ctx.Value(destination{}).(destination))
}

// dialVerified opens a connection to the agent of a sandbox, which has proved to be that if there is a verifier.
func (c *Client) dialVerified(ctx context.Context, network, address string, to destination) (net.Conn, error) {
	conn, err := c.dial(ctx, network, address)
	if err != nil || c.verifier == nil {
		return conn, err
	}
	verify := c.verifier.Verify
	if to.tokenless {
		verify = c.verifier.VerifyHash
	}
	if err := verify(ctx, conn, to.id); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// prewarmProcess runs a shell to completion, as clients run commands. The first process triggers one-time
// setup and loading in the sandbox kernel, so the owner's first command does not wait for it. Images
// without the shell are unaffected.
func (c *Client) prewarmProcess(ctx context.Context, s *agents.Sandbox) {
	agent, err := c.Agent(s)
	if err != nil {
		return
	}
	stream, err := agent.Process().Start(ctx, connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", "/bin/true"}},
	}))
	if err != nil {
		return
	}
	for stream.Receive() {
		continue // until it has ended
	}
	_ = stream.Close()
}

// dialAgent opens a connection to the agent of a sandbox on which it has answered.
func (c *Client) dialAgent(ctx context.Context, s *agents.Sandbox) (net.Conn, error) {
	conn, err := c.dialVerified(ctx, "tcp", agentAddress(s), destination{id: sandbox.IDOf(s.UID)})
	if err != nil || c.verifier != nil { // which has sent a request
		return conn, err
	}
	if err := health(ctx, conn, s); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// health has an agent answer a request for its health on a connection.
func health(ctx context.Context, conn net.Conn, s *agents.Sandbox) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, agentURL(s)+envd.PathHealth, http.NoBody)
	if err == nil {
		_, err = overConn{conn}.RoundTrip(req) //nolint:bodyclose // it is in memory
	}
	return err
}

// overConn is an http.RoundTripper over one connection, which it leaves open.
type overConn struct{ net.Conn }

// RoundTrip implements http.RoundTripper. It reads the whole response, of at most [envd.MaxResponseHeader] bytes.
func (c overConn) RoundTrip(req *http.Request) (*http.Response, error) {
	interrupted := context.AfterFunc(req.Context(), func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	res, err := c.exchange(req)
	if !interrupted() && err == nil {
		err = context.Cause(req.Context())
	}
	return res, err
}

func (c overConn) exchange(req *http.Request) (*http.Response, error) {
	if err := req.Write(c); err != nil {
		return nil, err
	}
	res, err := http.ReadResponse(bufio.NewReader(io.LimitReader(c, envd.MaxResponseHeader)), req)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(res.Body)
	res.Body = io.NopCloser(bytes.NewReader(body))
	return res, err
}
