package node

import (
	"time"

	"github.com/barchan-dev/barchan/internal/node/oci"
)

// refused says why nothing that takes room may be begun, if so.
func (n *Node) refused() error {
	return n.cfg.Refuse()
}

// observeStep reports how long something took.
func (n *Node) observeStep(class oci.Class, step string, took time.Duration) {
	n.cfg.ObserveStep(string(class), step, took)
}
