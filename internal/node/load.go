package node

import (
	"fmt"

	"github.com/barchan-dev/barchan/internal/node/journal"
)

// LoadJournal loads the journal without adopting its sandboxes, for Audit on a host without a running server. Afterwards only
// Audit and Close may be called.
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
