package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/programs"
)

// sweepEvery is the interval of sweeps. The first one waits for sweepAfter: a start has just read what it would read, and has other work.
const (
	sweepEvery = time.Minute
	sweepAfter = 5 * time.Second
)

// Sweep reconciles the host with the journal; see recovery.Recovery.
func (n *Node) Sweep(ctx context.Context) { n.recovery.Sweep(ctx) }

// Remove removes a sandbox from the host in any state, and interrupts its create. It returns nil only when nothing of it is
// left. It may be repeated.
func (n *Node) Remove(ctx context.Context, ref sandbox.Ref) error {
	if err := n.awaitAdopted(ctx); err != nil {
		return err
	}
	return n.recovery.Remove(ctx, ref)
}

// ObjectDeleted records that the object of a name is gone without a Remove, as when a client removes its finalizer. The next
// sweeps then remove the sandboxes of that name if they do not exist.
func (n *Node) ObjectDeleted(namespace, name string) {
	n.inits.forget(namespace, name)
	n.handles.ClearDesired(namespace, name)
}

// Destroy removes all sandboxes and the network of the instance. Run must have returned; afterwards only Close may be
// called.
func (n *Node) Destroy(ctx context.Context) error {
	failures := []error{n.recovery.Destroy(ctx)}
	for _, r := range n.runtimes.All() {
		failures = append(failures, r.Destroy())
	}
	failures = append(failures, n.network.Destroy(ctx), cgroups.Remove(n.cfg.CgroupParent))
	return errors.Join(failures...)
}

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

// sweepBuildsEvery is how often Run removes unused builds, the first time at the start.
const sweepBuildsEvery = 24 * time.Hour

// needsBuild reports whether a row of the node's database or an image of memory names a build.
func (n *Node) needsBuild(sha string) (bool, error) {
	found, err := journal.Mentions(n.db, sha)
	if err != nil || found {
		return found, err
	}
	return programs.ImagesMention(sha, slices.Concat(n.memory.SandboxDirs(), n.memory.CheckpointDirs(), []string{n.checkpoints.Root()})...)
}
