package node

import (
	"path/filepath"
	"time"

	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/programs"
)

// sweepBuildsEvery is how often Run removes unused builds, the first time at the start.
const sweepBuildsEvery = 24 * time.Hour

// needsBuild reports whether a row of the node's database or an image of memory names a build.
func (n *Node) needsBuild(sha string) (bool, error) {
	found, err := journal.Mentions(n.db, sha)
	if err != nil || found {
		return found, err
	}
	return programs.ImagesMention(sha, n.cfg.MemoryDir, filepath.Join(n.cfg.DataDir, "checkpoints"))
}
