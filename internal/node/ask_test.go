package node

import (
	"context"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// What tests ask of a sandbox from inside; production does so by its address, without the node.

// Agent is a client of a running sandbox's agent; none runs is an errs.ErrNotFound.
func (n *Node) Agent(ctx context.Context, ref sandbox.Ref) (*envd.Client, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	u := n.handles.Lookup(ref.UID)
	if u == nil {
		return nil, fmt.Errorf("sandbox %s/%s is not on this node: %w", ref.Namespace, ref.Name, errs.ErrNotFound)
	}
	seen := u.Observed()
	if seen.State != sandbox.ContainerRunning {
		return nil, fmt.Errorf("sandbox %s/%s is %s: %w", ref.Namespace, ref.Name, seen.State, errs.ErrNotFound)
	}
	return n.host.AgentOf(u.ID, seen.Address)
}

// Stats is a running sandbox's usage as its agent reports it, as seen from inside.
func (n *Node) Stats(ctx context.Context, ref sandbox.Ref) (envd.Metrics, error) {
	agent, err := n.Agent(ctx, ref)
	if err != nil {
		return envd.Metrics{}, err
	}
	return agent.Metrics(ctx)
}

// Logs returns the lines that a running sandbox's agent keeps and that are not older than
// since, oldest first.
func (n *Node) Logs(ctx context.Context, ref sandbox.Ref, since time.Time) (lines []envd.LogLine, err error) {
	agent, err := n.Agent(ctx, ref)
	if err != nil {
		return nil, err
	}
	err = agent.Logs(ctx, "", false, func(l envd.LogLine) error {
		if !l.Timestamp.Before(since) {
			lines = append(lines, l)
		}
		return nil
	})
	return lines, err
}
