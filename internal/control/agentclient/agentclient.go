// Package agentclient reaches the agents of sandboxes by the sandboxes' addresses. To make claims, and the first requests after them, fast
// it keeps one connection to each ready member of a warm pool, on which the agent has answered once. It
// decides nothing about a sandbox, retries nothing but a kept connection that the agent had closed, and
// keeps no state of an agent.
//
// With a Verifier, an agent gets no request, and so no token, on a connection before it has proved there which sandbox
// it is.
//
// Its lock is held over no request.
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
	"sync"
	"time"

	"connectrpc.com/connect"
	"go.opentelemetry.io/otel/trace"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

const (
	// keepOpen bounds the age of a connection that waits for its claim. Agents close what was idle
	// for longer.
	keepOpen = 5 * time.Minute
	// maxOpen bounds how many of them there are, and openAtOnce how many are being opened.
	maxOpen    = 1024
	openAtOnce = 4
	// openTimeout bounds the opening of one.
	openTimeout = 2 * time.Second
	// wakeTimeout bounds the answer of an agent that is woken. After it, the claim opens a connection of its own.
	wakeTimeout = 250 * time.Millisecond
	// answerTimeout bounds what an agent is asked for a client's request: one that a tenant has replaced may be silent.
	answerTimeout = 5 * time.Second
)

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

// Client sends requests to agents. While Run runs, it keeps one connection to each ready member that
// Observe has shown. Such a connection is used once, for its sandbox and for no other that has its
// address later. It is safe for concurrent use.
type Client struct {
	tokens    *sandbox.Tokens
	dial      func(ctx context.Context, network, address string) (net.Conn, error)
	verifier  Verifier // nil: none
	transport *http.Transport
	wanted    chan *agents.Sandbox
	openIn    time.Duration // openTimeout; tests are more patient
	answerIn  time.Duration

	wakes sync.WaitGroup

	mu      sync.Mutex
	open    map[sandbox.ID]opened // +checklocks:mu
	running bool                  // +checklocks:mu
}

// opened is a kept connection; conn is nil while it is being opened, or while its agent is woken.
type opened struct {
	conn  net.Conn
	at    time.Time
	to    *agents.Sandbox
	over  bool          // the sandbox is no longer a ready member
	woken chan struct{} // closed when the agent has been woken; nil: nothing wakes it
}

// destination is where a request goes; also the key of its context value.
type destination struct {
	id sandbox.ID
	// tokenless: the agent may not know its token yet.
	tokenless bool
}

// sender sends requests to the agent of one sandbox.
type sender struct {
	b  *Client
	to destination
}

// RoundTrip implements http.RoundTripper.
func (s sender) RoundTrip(req *http.Request) (*http.Response, error) {
	return s.b.transport.RoundTrip(req.WithContext(context.WithValue(req.Context(), destination{}, s.to)))
}

// New opens nothing.
func New(cfg Config) *Client {
	b := &Client{
		tokens: cfg.Tokens, dial: cfg.Dial, verifier: cfg.Verifier, wanted: make(chan *agents.Sandbox, maxOpen), openIn: openTimeout,
		answerIn: cmp.Or(cfg.AnswerTimeout, answerTimeout), open: map[sandbox.ID]opened{},
	}
	if b.dial == nil {
		b.dial = (&net.Dialer{Timeout: time.Second}).DialContext
	}
	b.transport = &http.Transport{
		DialContext: b.connect, DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: envd.MaxResponseHeader,
	}
	return b
}

// Bind sends a request to the agent of a sandbox. ctx must have a deadline. An agent that does not know its token yet
// is accepted if the request has the token.
func (b *Client) Bind(ctx context.Context, s *agents.Sandbox, req envd.InitRequest) (err error) {
	to := destination{id: sandbox.IDOf(s.UID), tokenless: req.AccessToken != ""}
	ctx, end := telemetry.StartSpan(ctx, "agent init", trace.WithSpanKind(trace.SpanKindClient), telemetry.OfSandbox(string(to.id)))
	defer func() { end(err) }()
	b.awaitWoken(ctx, to.id)
	if conn := b.Take(to.id); conn != nil {
		agent, err := b.agentOver(overConn{conn}, s, "")
		if err == nil {
			err = agent.Init(ctx, req)
		}
		if err == nil {
			b.keepClaimed(s, conn)
			return nil
		}
		_ = conn.Close() // the agent may have closed it; the request is sent on a new one
	}
	agent, err := b.agent(s, to)
	if err != nil {
		return fmt.Errorf("client of the agent of sandbox %s: %w", to.id, err)
	}
	if err := agent.Init(ctx, req); err != nil {
		return fmt.Errorf("bind the agent of sandbox %s: %w: %w", to.id, errs.ErrUnavailable, err)
	}
	return nil
}

// Wake has the agent of a ready member answer a request without content on its kept connection, if there is one, and does not wait
// for that: an agent that has rested needs milliseconds for its first answer. Bind waits for it.
func (b *Client) Wake(ctx context.Context, s *agents.Sandbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := sandbox.IDOf(s.UID)
	o := b.open[id]
	if !b.running || o.conn == nil {
		return
	}
	conn, woken := o.conn, make(chan struct{})
	o.conn, o.woken = nil, woken
	b.open[id] = o
	b.wakes.Go(func() {
		defer close(woken)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), wakeTimeout)
		defer cancel()
		err := health(ctx, conn, o.to)
		b.storeConn(o.to, conn, err)
	})
}

// awaitWoken returns when nothing wakes the agent of a sandbox.
func (b *Client) awaitWoken(ctx context.Context, id sandbox.ID) {
	b.mu.Lock()
	woken := b.open[id].woken
	b.mu.Unlock()
	if woken == nil {
		return
	}
	select {
	case <-woken:
	case <-ctx.Done():
	}
}

// Stats returns what a running sandbox uses now. Errors are those of AnswerError.
func (b *Client) Stats(ctx context.Context, s *agents.Sandbox) (m envd.Metrics, err error) {
	err = b.ask(ctx, s, func(ctx context.Context, agent *envd.Client) error {
		m, err = agent.Metrics(ctx)
		return err
	})
	return m, err
}

// StatsHistory returns what a running sandbox has used since a time in the last hour, oldest first, and last what it uses now. From an
// agent that keeps no history it returns the last alone. Errors are those of AnswerError.
func (b *Client) StatsHistory(ctx context.Context, s *agents.Sandbox, since time.Time) (all []envd.Metrics, err error) {
	err = b.ask(ctx, s, func(ctx context.Context, agent *envd.Client) error {
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
func (b *Client) Logs(ctx context.Context, s *agents.Sandbox, container string, since time.Time) (lines []envd.LogLine, err error) {
	err = b.ask(ctx, s, func(ctx context.Context, agent *envd.Client) error {
		if container != "" {
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
func (b *Client) ask(ctx context.Context, s *agents.Sandbox, question func(ctx context.Context, agent *envd.Client) error) error {
	agent, err := b.Agent(s)
	if err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, b.answerIn)
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
func (b *Client) Agent(s *agents.Sandbox) (*envd.Client, error) {
	return b.agent(s, destination{id: sandbox.IDOf(s.UID)})
}

// AgentAs returns a client whose programs run as a user of the sandbox; empty: the agent's default.
func (b *Client) AgentAs(s *agents.Sandbox, user string) (*envd.Client, error) {
	return b.agentAs(s, destination{id: sandbox.IDOf(s.UID)}, user)
}

func (b *Client) agent(s *agents.Sandbox, to destination) (*envd.Client, error) {
	return b.agentAs(s, to, "")
}

func (b *Client) agentAs(s *agents.Sandbox, to destination, user string) (*envd.Client, error) {
	return b.agentOver(sender{b, to}, s, user)
}

func (b *Client) agentOver(transport http.RoundTripper, s *agents.Sandbox, user string) (*envd.Client, error) {
	id := sandbox.IDOf(s.UID)
	if len(s.Status.PodIPs) == 0 {
		return nil, fmt.Errorf("sandbox %s has no address: %w", id, errs.ErrUnavailable)
	}
	return envd.NewClient(envd.ClientConfig{
		HTTP: &http.Client{Transport: telemetry.TraceTransport(transport)}, BaseURL: agentURL(s), User: user, Token: func() string { return b.tokens.Agent(id) },
	})
}

func agentURL(s *agents.Sandbox) string { return "http://" + agentAddress(s) }

func agentAddress(s *agents.Sandbox) string {
	return net.JoinHostPort(s.Status.PodIPs[0], strconv.Itoa(envd.Port))
}

func (b *Client) has(id sandbox.ID) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open[id].conn != nil
}

// Take returns the kept connection of a sandbox, which the caller then closes; nil if there is none. Requests follow those that the agent
// has answered on it. The agent may have closed it.
func (b *Client) Take(id sandbox.ID) net.Conn {
	b.mu.Lock()
	defer b.mu.Unlock()
	conn := b.open[id].conn
	if conn != nil {
		delete(b.open, id)
	}
	return conn
}

func (b *Client) connect(ctx context.Context, network, address string) (net.Conn, error) {
	return b.dialVerified(ctx, network, address, ctx.Value(destination{}).(destination))
}

// dialVerified opens a connection to the agent of a sandbox, which has proved to be that if there is a verifier.
func (b *Client) dialVerified(ctx context.Context, network, address string, to destination) (net.Conn, error) {
	conn, err := b.dial(ctx, network, address)
	if err != nil || b.verifier == nil {
		return conn, err
	}
	verify := b.verifier.Verify
	if to.tokenless {
		verify = b.verifier.VerifyHash
	}
	if err := verify(ctx, conn, to.id); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// Observe takes a change of any Sandbox: newer is nil when it is gone. It does not block.
func (b *Client) Observe(older, newer *agents.Sandbox) {
	if newer == nil || !pool.Spare(newer) || len(newer.Status.PodIPs) == 0 {
		if older != nil {
			b.markUnused(sandbox.IDOf(older.UID))
		}
		return
	}
	b.mu.Lock()
	id := sandbox.IDOf(newer.UID)
	_, begun := b.open[id]
	begin := b.running && !begun && len(b.open) < maxOpen
	if begin {
		b.open[id] = opened{at: time.Now(), to: newer}
	}
	b.mu.Unlock()
	if begin {
		b.enqueueDial(newer)
	}
}

// markUnused leaves a connection to a claim in progress; renew closes it otherwise.
func (b *Client) markUnused(id sandbox.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if o, ok := b.open[id]; ok {
		o.over = true
		b.open[id] = o
	}
}

func (b *Client) enqueueDial(s *agents.Sandbox) {
	select {
	case b.wanted <- s:
	default: // its claim opens one
		b.mu.Lock()
		delete(b.open, sandbox.IDOf(s.UID))
		b.mu.Unlock()
	}
}

// Run opens connections until ctx is done, and closes the remaining ones.
func (b *Client) Run(ctx context.Context) error {
	b.setRunning(true)
	defer b.wakes.Wait()
	defer b.closeAll()
	defer b.setRunning(false)
	var wg sync.WaitGroup
	defer wg.Wait()
	for range openAtOnce {
		wg.Go(func() {
			for {
				select {
				case s := <-b.wanted:
					b.prepare(ctx, s)
				case <-ctx.Done():
					return
				}
			}
		})
	}
	tick := time.NewTicker(keepOpen / 5)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			b.renew(time.Now())
		case <-ctx.Done():
			return nil
		}
	}
}

func (b *Client) setRunning(running bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running = running
}

// renew closes unused connections, and replaces old ones.
func (b *Client) renew(now time.Time) {
	b.mu.Lock()
	var again []*agents.Sandbox
	for id, o := range b.open {
		switch {
		case o.over:
			b.closeLocked(id)
		case now.Sub(o.at) >= keepOpen:
			b.closeLocked(id)
			b.open[id] = opened{at: now, to: o.to}
			again = append(again, o.to)
		}
	}
	b.mu.Unlock()
	for _, s := range again {
		b.enqueueDial(s)
	}
}

func (b *Client) closeAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id := range b.open {
		b.closeLocked(id)
	}
}

// +checklocks:b.mu
func (b *Client) closeLocked(id sandbox.ID) {
	if conn := b.open[id].conn; conn != nil {
		_ = conn.Close()
	}
	delete(b.open, id)
}

// prepare opens a connection and sends a request on it: the agent would soon close one without. Then it
// starts a process in the sandbox.
func (b *Client) prepare(ctx context.Context, s *agents.Sandbox) {
	ctx, cancel := context.WithTimeout(ctx, b.openIn)
	defer cancel()
	conn, err := b.dialAgent(ctx, s)
	b.storeConn(s, conn, err)
	if err == nil {
		b.prewarmProcess(ctx, s)
	}
}

// prewarmProcess runs a shell to completion, as clients run commands. The first process triggers one-time
// setup and loading in the sandbox kernel, so the owner's first command does not wait for it. Images
// without the shell are unaffected.
func (b *Client) prewarmProcess(ctx context.Context, s *agents.Sandbox) {
	agent, err := b.Agent(s)
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

// storeConn keeps a connection for its claim.
func (b *Client) storeConn(s *agents.Sandbox, conn net.Conn, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := sandbox.IDOf(s.UID)
	o, wanted := b.open[id]
	if err != nil || !wanted || o.conn != nil {
		if conn != nil {
			_ = conn.Close()
		}
		if o.conn == nil {
			delete(b.open, id) // its claim opens one
		}
		return
	}
	o.conn, o.at, o.woken = conn, time.Now(), nil
	b.open[id] = o
}

// keepClaimed keeps a connection that a claim has used for the first request to its sandbox, which comes soon or not at all.
func (b *Client) keepClaimed(s *agents.Sandbox, conn net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := sandbox.IDOf(s.UID)
	if _, has := b.open[id]; has || !b.running {
		_ = conn.Close()
		return
	}
	b.open[id] = opened{conn: conn, at: time.Now(), to: s, over: true}
}

func (b *Client) dialAgent(ctx context.Context, s *agents.Sandbox) (net.Conn, error) {
	conn, err := b.dialVerified(ctx, "tcp", agentAddress(s), destination{id: sandbox.IDOf(s.UID)})
	if err != nil || b.verifier != nil { // which has sent a request
		return conn, err
	}
	if err := health(ctx, conn, s); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// health sends a request for the agent's health on a connection, and reads the answer.
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
