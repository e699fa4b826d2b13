package node

import (
	"time"

	"github.com/barchan-dev/barchan/internal/node/oci"
)

// refused returns why no work that needs disk space may begin, or nil.
func (n *Node) refused() error {
	return n.cfg.Refuse()
}

// observeStep records the duration of a step.
func (n *Node) observeStep(class oci.Class, step string, took time.Duration) {
	n.cfg.ObserveStep(string(class), step, took)
}
