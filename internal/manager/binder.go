package manager

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/envd"
	"github.com/barchan-dev/barchan/internal/errs"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

// BinderConfig is what NewBinder needs.
type BinderConfig struct {
	// Tokens are those of the agents. Required.
	Tokens *sandbox.Tokens
	// Dial reaches an agent by its address; nil is TCP from here.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// AgentBinder talks to agents by the addresses of their sandboxes. It is safe for concurrent use.
type AgentBinder struct {
	tokens *sandbox.Tokens
	http   *http.Client
}

// NewBinder opens nothing.
func NewBinder(cfg BinderConfig) *AgentBinder {
	dial := cfg.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: time.Second}).DialContext
	}
	// A sandbox is claimed once, and its address becomes another's: a connection that is kept
	// could only ever reach the wrong one.
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: true, DisableCompression: true}
	return &AgentBinder{tokens: cfg.Tokens, http: &http.Client{Transport: transport}}
}

// Bind has the agent of a sandbox take a request. ctx must have a deadline.
func (b *AgentBinder) Bind(ctx context.Context, s *agents.Sandbox, req envd.InitRequest) error {
	id := sandbox.IDOf(s.UID)
	if len(s.Status.PodIPs) == 0 {
		return fmt.Errorf("sandbox %s has no address: %w", id, errs.ErrUnavailable)
	}
	agent, err := envd.NewClient(envd.ClientConfig{
		HTTP:    b.http,
		BaseURL: "http://" + net.JoinHostPort(s.Status.PodIPs[0], strconv.Itoa(envd.Port)),
		Token:   func() string { return b.tokens.Agent(id) },
	})
	if err != nil {
		return fmt.Errorf("client of the agent of sandbox %s: %w", id, err)
	}
	if err := agent.Init(ctx, req); err != nil {
		return fmt.Errorf("tell the agent of sandbox %s of its claim: %w: %w", id, errs.ErrUnavailable, err)
	}
	return nil
}
