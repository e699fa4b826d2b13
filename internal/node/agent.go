package node

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// firstLook and lastLook bound the pauses between two questions to an agent that starts.
const (
	firstLook = time.Millisecond
	lastLook  = 10 * time.Millisecond
	// oneLook bounds the first of them: a packet sent before the sandbox listened is lost, and
	// would be sent again only after a second. longLook bounds all later ones, which are given more
	// and more time: on a machine with too much to do every answer takes long.
	oneLook  = 50 * time.Millisecond
	longLook = 2 * time.Second
)

func agentDialer() *net.Dialer {
	return &net.Dialer{Timeout: 2 * time.Second, KeepAlive: 30 * time.Second}
}

// agentOf is a client of the agent at an address.
func (n *Node) agentOf(id sandbox.ID, addr netip.Addr) (*envd.Client, error) {
	cfg := envd.ClientConfig{HTTP: n.agents, BaseURL: "http://" + net.JoinHostPort(addr.String(), strconv.Itoa(envd.Port))}
	if n.cfg.AgentToken != nil {
		cfg.Token = func() string { return n.cfg.AgentToken(id) }
	}
	c, err := envd.NewClient(cfg)
	if err != nil {
		return nil, fmt.Errorf("client of agent: %w", err)
	}
	return c, nil
}

// awaitAgent returns when the agent has answered and knows the time.
func (w *operation) awaitAgent(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.n.cfg.StartTimeout)
	defer cancel()
	agent, err := w.awaitHealth(ctx)
	if err != nil {
		return err
	}
	now := time.Now()
	if err := agent.Init(ctx, envd.InitRequest{Timestamp: &now}); err != nil {
		return errs.Retryable(fmt.Errorf("init agent: %w", err))
	}
	return nil
}

// awaitHealth returns when the agent has answered.
func (w *operation) awaitHealth(ctx context.Context) (*envd.Client, error) {
	agent, err := w.n.agentOf(w.row.Plan.ID, w.row.Address)
	if err != nil {
		return nil, err
	}
	pause, patience := firstLook, oneLook
	for {
		look, done := context.WithTimeout(ctx, patience)
		err := agent.Health(look)
		if look.Err() != nil {
			patience = min(patience+patience/4, longLook)
		}
		done()
		if err == nil {
			return agent, nil
		}
		if !w.row.Process.Alive() {
			return nil, fmt.Errorf("the sandbox ended before its agent answered: %s: %w", w.console.Text(), errs.ErrUnavailable)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, fmt.Errorf("the agent did not answer within %s: %w: %s: %w", w.n.cfg.StartTimeout, err, w.console.Text(), errs.ErrUnavailable)
		}
		pause = min(2*pause, lastLook)
	}
}
