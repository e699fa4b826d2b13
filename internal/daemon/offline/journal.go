package offline

import (
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/adminops"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// Journal reads the journal of a machine without a running server, without the content of its rows.
func Journal(cfg *config.Config) ([]adminclient.JournalRow, error) {
	rows, err := journal.ReadSummaries(filepath.Join(cfg.DataDir, "node", "node.db"))
	if err != nil {
		return nil, err
	}
	return adminops.JournalRows(rows), nil
}
