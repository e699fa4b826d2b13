package node

import (
	"fmt"

	"github.com/barchan-dev/barchan/internal/node/journal"
)

// LoadJournal has the node know what its journal has, without adopting any of it: for Audit on a machine
// where no server runs. A node that has done so is of no other use.
func (n *Node) LoadJournal() error {
	var unread error
	err := n.journal.Each(func(r *journal.Row) { n.handles.Of(r.Plan.Ref).SetRow(r) }, func(key, _ []byte, err error) {
		unread = fmt.Errorf("row %q of the journal: %w", key, err)
	})
	if err == nil {
		err = n.checkpoints.Load(func(key, _ []byte, err error) { unread = fmt.Errorf("row %q of checkpoints: %w", key, err) })
	}
	if err == nil {
		err = unread
	}
	if err != nil {
		return fmt.Errorf("read the journal: %w", err)
	}
	return nil
}
