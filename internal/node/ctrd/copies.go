package ctrd

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
)

// SnapshotCopy copies a writable snapshot to a committed one in parts, so that the writer pauses
// for one of them only. Call PreCopy (optional), FinalCopy and Commit in this order, and always
// Close at the end.
type SnapshotCopy struct {
	*part
	tree *filetree.Copy
}

// BeginCopy prepares a copy of a writable snapshot and copies nothing. A gVisor sandbox has flushed
// its writes once oci.Checkpoint has written its memory. The copy may be repeated after a crash or
// failure; the next call, or later containerd's collector, removes leftovers. A taken name is an
// errs.ErrConflict; more than MaxDepth stacked snapshots are an errs.ErrExhausted. The writes are in
// from; empty: in containerd's directory.
func (c *Client) BeginCopy(ctx context.Context, key, from, name string) (*SnapshotCopy, error) {
	action := fmt.Sprintf("copy snapshot %s to %s", key, name)
	if from == "" {
		source, err := c.Snapshot(ctx, key)
		if err != nil {
			return nil, kind(action, err)
		}
		var ok bool
		if from, ok = source.upper(); !ok {
			return nil, fmt.Errorf("%s: not writable: %w", action, errs.ErrInvalid)
		}
	}
	info, err := c.stat(ctx, key)
	if err != nil {
		return nil, kind(action, err)
	}
	p, err := c.begin(ctx, name, info.Parent, action)
	if err != nil {
		return nil, err
	}
	return &SnapshotCopy{part: p, tree: filetree.NewCopy(p.dir, from)}, nil
}

// PreCopy copies a large snapshot while the sandbox may write to it.
func (s *SnapshotCopy) PreCopy(ctx context.Context) error { return s.wrap(s.tree.PreCopy(ctx)) }

// FinalCopy copies the rest, and what has changed since PreCopy. The sandbox must not write until
// it returns.
func (s *SnapshotCopy) FinalCopy(ctx context.Context) error { return s.wrap(s.tree.FinalCopy(ctx)) }

func (s *SnapshotCopy) wrap(err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", s.action, err)
	}
	return nil
}

// part is a committed snapshot being created.
type part struct {
	c            *Client
	name, action string
	lease        leases.Lease
	// dir receives the content.
	dir  string
	done bool
}

func partOf(name string) string { return name + partSuffix }

// begin creates the directory of a committed snapshot.
func (c *Client) begin(ctx context.Context, name, parent, action string) (_ *part, err error) {
	if _, err := c.stat(ctx, name); err == nil {
		return nil, fmt.Errorf("%s: name taken: %w", action, errs.ErrConflict)
	} else if !errdefs.IsNotFound(err) {
		return nil, kind(action, err)
	}
	if err := c.checkDepth(ctx, parent); err != nil {
		return nil, kind(action, err)
	}
	p := &part{c: c, name: name, action: action}
	if p.lease, err = c.lease(ctx); err != nil {
		return nil, kind(action, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close(ctx))
		}
	}()
	if err := c.RemoveSnapshot(ctx, partOf(name)); err != nil {
		return nil, err
	}
	rootfs, err := c.preparePart(p.leased(ctx), partOf(name), parent)
	if err != nil {
		return nil, kind(action, err)
	}
	dir, ok := rootfs.upper()
	if !ok {
		return nil, fmt.Errorf("%s: snapshot without an upper directory: %w", action, errs.ErrUnavailable)
	}
	p.dir = dir
	return p, nil
}

func (p *part) leased(ctx context.Context) context.Context { return leases.WithLease(ctx, p.lease.ID) }

// Commit makes the copy durable and names it.
func (p *part) Commit(ctx context.Context) (Committed, error) {
	if err := filetree.Sync(p.dir); err != nil {
		return Committed{}, fmt.Errorf("%s: %w", p.action, err)
	}
	one, err := p.c.commit(p.leased(ctx), partOf(p.name), p.name, p.action)
	p.done = err == nil
	return one, err
}

// Close removes an uncommitted copy, also after the end of the context.
func (p *part) Close(ctx context.Context) (err error) {
	if !p.done {
		err = p.c.RemoveSnapshot(ctx, partOf(p.name))
	}
	p.c.release(ctx, p.lease)
	return err
}

// RemoveCopy removes the leftovers of an interrupted copy, and the committed snapshot as
// RemoveCommitted does. No copy to the name may be running.
func (c *Client) RemoveCopy(ctx context.Context, name string) error {
	return errors.Join(c.RemoveSnapshot(ctx, partOf(name)), c.RemoveCommitted(ctx, name))
}
