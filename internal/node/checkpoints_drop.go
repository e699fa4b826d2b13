package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// Captured tells what the node has of a checkpoint. One that it does not have in full is an
// errs.ErrNotFound; one that is being written now, or whose row cannot be read, is an errs.ErrUnavailable.
func (n *Node) Captured(ctx context.Context, ref sandbox.CheckpointRef) (sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Captured{}, err
	}
	if err := n.shelf.checkRead(ref); err != nil {
		return sandbox.Captured{}, err
	}
	c := n.shelf.row(ref.UID)
	if c != nil && c.Stage == checkpointWriting && n.shelf.busy(ref.UID) {
		return sandbox.Captured{}, fmt.Errorf("checkpoint %s/%s is being written: %w", ref.Namespace, ref.Name, errs.ErrUnavailable)
	}
	if c == nil || c.Stage != checkpointReady {
		return sandbox.Captured{}, fmt.Errorf("checkpoint %s/%s is not on this node: %w", ref.Namespace, ref.Name, errs.ErrNotFound)
	}
	return n.captured(c), nil
}

// Checkpoints tells of all checkpoints that the node has in full, in no order.
func (n *Node) Checkpoints(ctx context.Context) ([]sandbox.Captured, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	var all []sandbox.Captured
	for _, k := range n.shelf.all() {
		if c := k.current(); c != nil && c.Stage == checkpointReady {
			all = append(all, n.captured(c))
		}
	}
	return all, nil
}

// DropCheckpoint removes a checkpoint, also while it is being made. It returns nil only when nothing
// of it is left; repeating it is harmless. No sandbox can be made from it from now on, and those that
// are being made are waited for: where that takes longer than ctx, it is an errs.ErrUnavailable.
func (n *Node) DropCheckpoint(ctx context.Context, ref sandbox.CheckpointRef) error {
	if err := n.awaitAdopted(ctx); err != nil {
		return err
	}
	if err := checkCheckpoint(ref); err != nil {
		return err
	}
	ctx, k, done, err := n.shelf.take(ctx, ref, true)
	if err != nil {
		return err
	}
	defer done()
	if err := n.dropKept(ctx, k); err != nil {
		return fmt.Errorf("remove checkpoint %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	n.log.InfoContext(ctx, "checkpoint removed", telemetry.Namespace, ref.Namespace, "checkpoint", ref.Name)
	return nil
}

// dropKept removes a checkpoint, in its turn.
func (n *Node) dropKept(ctx context.Context, k *checkpointHandle) error {
	if c := k.current(); c != nil && c.Stage != checkpointDropping {
		if err := n.noteCheckpoint(k, new(*c), checkpointDropping); err != nil {
			return err
		}
		failpoint.Reach("checkpoint/dropping")
	}
	if err := k.awaitReaders(ctx); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return n.eraseCheckpoint(limited, k)
}

// removeCheckpointData removes the files of a checkpoint, which nobody may be at.
func (n *Node) removeCheckpointData(ctx context.Context, uid types.UID) error {
	failures := []error{n.cfg.Containerd.RemoveCopy(ctx, checkpointSnapshot(uid))}
	if err := os.RemoveAll(n.checkpointDir(uid)); err != nil {
		failures = append(failures, fmt.Errorf("remove files of a checkpoint: %w", err))
	}
	return errors.Join(failures...)
}

// loadCheckpoints reads the rows of checkpoints.
func (n *Node) loadCheckpoints(ctx context.Context) error {
	err := n.shelf.load(func(key, value []byte, err error) {
		n.log.ErrorContext(ctx, "row of a checkpoint cannot be read; it and its data are kept",
			"key", fmt.Sprintf("%q", key), "value", fmt.Sprintf("%q", value), telemetry.Error, err)
	})
	if err != nil {
		return fmt.Errorf("read the books of checkpoints: %w", err)
	}
	return nil
}

// settleCheckpoints removes what was being made or removed of checkpoints when somebody else ended,
// where nobody is at it now. Failing is no reason for anything else to fail: the next look tries again.
func (n *Node) settleCheckpoints(ctx context.Context) (undone int) {
	for _, k := range n.shelf.all() {
		c := k.current()
		if c == nil || c.Stage == checkpointReady || n.shelf.busy(k.ref.UID) {
			continue
		}
		ctx, k, done, err := n.shelf.take(ctx, k.ref, false)
		if err != nil {
			return undone
		}
		if c := k.current(); c != nil && c.Stage != checkpointReady {
			limited, cancel := context.WithTimeout(ctx, undoTimeout)
			if err := n.dropKept(limited, k); err != nil {
				n.log.WarnContext(ctx, "checkpoint cannot be removed yet", telemetry.Namespace, k.ref.Namespace, "checkpoint", k.ref.Name, telemetry.Error, err)
			} else {
				undone++
			}
			cancel()
		}
		done()
	}
	return undone
}

// strayCheckpoints finds what has the name of a checkpoint and no row: directories and snapshots, by
// UID, as lines for people; and rows whose data are not there.
func (n *Node) strayCheckpoints(ctx context.Context) (stray map[types.UID][]string, lame []string, err error) {
	rows := map[types.UID]*checkpoint{}
	know := func() {
		for _, k := range n.shelf.all() {
			if c := k.current(); c != nil {
				rows[k.ref.UID] = c
			}
		}
	}
	know()
	dirs, err := entries(n.checkpointsDir())
	failures := []error{err}
	committed, err := n.cfg.Containerd.Committed(ctx)
	failures = append(failures, err)
	know() // what was begun meanwhile
	stray = map[types.UID][]string{}
	unread := n.shelf.unread()
	has := map[types.UID]int{}
	add := func(uid types.UID, what string) {
		has[uid]++
		if _, kept := unread[uid]; rows[uid] == nil && !kept {
			stray[uid] = append(stray[uid], what)
		}
	}
	for _, name := range dirs {
		add(types.UID(name), "checkpoint's directory "+name)
	}
	for _, one := range committed {
		if uid, ok := strings.CutPrefix(one.Name, checkpointPrefix); ok {
			add(types.UID(uid), "checkpoint's snapshot "+one.Name)
		}
	}
	if err := errors.Join(failures...); err != nil {
		return nil, nil, err
	}
	for uid, c := range rows {
		if c.Stage == checkpointReady && has[uid] < 2 {
			lame = append(lame, fmt.Sprintf("checkpoint %s/%s (%s), whose files are not all there", c.Ref.Namespace, c.Ref.Name, uid))
		}
	}
	return stray, lame, nil
}

// dropStrayCheckpoints removes what has the name of a checkpoint and no row. Nobody may be making one.
func (n *Node) dropStrayCheckpoints(ctx context.Context) error {
	stray, lame, err := n.strayCheckpoints(ctx)
	failures := []error{err}
	for uid, what := range stray {
		n.log.InfoContext(ctx, "removing what is left of a checkpoint without a row", "uid", uid, "what", what)
		if err := checkCheckpoint(sandbox.CheckpointRef{UID: uid}); err != nil {
			failures = append(failures, err)
			continue
		}
		failures = append(failures, n.removeCheckpointData(ctx, uid))
	}
	for _, what := range lame {
		n.log.ErrorContext(ctx, "files of a checkpoint are missing; nothing can be made from it", "what", what)
	}
	return errors.Join(failures...)
}

// adoptCheckpoints brings the checkpoints in order that a node before this one left.
func (n *Node) adoptCheckpoints(ctx context.Context) {
	began := time.Now()
	undone := n.settleCheckpoints(ctx)
	if err := n.dropStrayCheckpoints(ctx); err != nil {
		n.log.WarnContext(ctx, "data without a checkpoint may be left", telemetry.Error, err)
	}
	if undone > 0 {
		n.log.InfoContext(ctx, "removed checkpoints that were half made or half removed", "undone", undone, telemetry.Duration, time.Since(began))
	}
}

// destroyCheckpoints removes all checkpoints, and what cannot be read of them.
func (n *Node) destroyCheckpoints(ctx context.Context) error {
	failures := []error{n.shelf.load(func([]byte, []byte, error) {})}
	refs := []sandbox.CheckpointRef{}
	for uid := range n.shelf.unread() {
		refs = append(refs, sandbox.CheckpointRef{UID: uid})
	}
	for _, k := range n.shelf.all() {
		refs = append(refs, k.ref)
	}
	for _, ref := range refs {
		failures = append(failures, n.eraseCheckpoint(ctx, n.shelf.of(ref)))
	}
	return errors.Join(append(failures, n.dropStrayCheckpoints(ctx))...)
}
