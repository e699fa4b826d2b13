package node

import (
	"context"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Status is a sandbox and its observed state.
type Status struct {
	Ref      sandbox.Ref
	Observed sandbox.Observed
}

// List returns all sandboxes of the node, in no order.
func (n *Node) List(ctx context.Context) ([]Status, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	var all []Status
	for _, u := range n.handles.All() {
		all = append(all, Status{Ref: u.Ref, Observed: u.Observed()})
	}
	return all, nil
}
