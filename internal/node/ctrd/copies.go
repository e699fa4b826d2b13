package ctrd

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// CopySnapshot makes a committed snapshot that is now what a writable one is, which stays as it
// is. Its owner must not be writing to it: a gVisor sandbox is paused, and has flushed what it
// holds, once oci.Checkpoint has written its memory. copied, unless nil, is called as soon as the
// owner may write again, before the copy is durable. It may be repeated after a crash or a failure,
// which leave nothing but what the next call or, after hours, containerd's collector removes. A name
// that is taken is an errs.ErrConflict.
func (c *Client) CopySnapshot(ctx context.Context, key, name string, copied func()) (_ Committed, err error) {
	p, err := c.BeginCopy(ctx, key, name)
	if err != nil {
		return Committed{}, err
	}
	defer func() { err = errors.Join(err, p.Close(ctx)) }()
	if err := p.FinalCopy(ctx); err != nil {
		return Committed{}, err
	}
	if copied != nil {
		copied()
	}
	return p.Commit(ctx)
}

// SnapshotCopy is a copy of a writable snapshot on its way to being a committed one, in parts, so
// that its owner is held still for one of them only. Its methods are called one after the other:
// Ahead, which may be left out, Take, Commit; and Close in any case, at the end.
type SnapshotCopy struct {
	*part
	tree *TreeCopy
}

// BeginCopy does what must precede a copy of a snapshot, and copies nothing. What it says of names,
// crashes and failures is what CopySnapshot says.
func (c *Client) BeginCopy(ctx context.Context, key, name string) (*SnapshotCopy, error) {
	action := fmt.Sprintf("copy snapshot %s to %s", key, name)
	source, err := c.Snapshot(ctx, key)
	if err != nil {
		return nil, kind(action, err)
	}
	from, ok := source.writes()
	if !ok {
		return nil, fmt.Errorf("%s: it cannot be written: %w", action, errs.ErrInvalid)
	}
	info, err := c.stat(ctx, key)
	if err != nil {
		return nil, kind(action, err)
	}
	p, err := c.begin(ctx, name, info.Parent, action)
	if err != nil {
		return nil, err
	}
	return &SnapshotCopy{part: p, tree: NewTreeCopy(p.dir, from)}, nil
}

// Ahead copies what is there now, if it is much, while the owner may be writing.
func (s *SnapshotCopy) PreCopy(ctx context.Context) error { return s.told(s.tree.PreCopy(ctx)) }

// Take copies all that Ahead did not or that has changed since. The owner must not be writing before it
// has returned.
func (s *SnapshotCopy) FinalCopy(ctx context.Context) error { return s.told(s.tree.FinalCopy(ctx)) }

func (s *SnapshotCopy) told(err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", s.action, err)
	}
	return nil
}

// part is a committed snapshot in the making.
type part struct {
	c            *Client
	name, action string
	lease        leases.Lease
	// dir is to be filled.
	dir  string
	done bool
}

func partOf(name string) string { return name + partSuffix }

// begin makes the directory of a committed snapshot in the making.
func (c *Client) begin(ctx context.Context, name, parent, action string) (_ *part, err error) {
	if _, err := c.stat(ctx, name); err == nil {
		return nil, fmt.Errorf("%s: the name is taken: %w", action, errs.ErrConflict)
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
	dir, ok := rootfs.writes()
	if !ok {
		return nil, fmt.Errorf("%s: its snapshot has no directory to write to: %w", action, errs.ErrUnavailable)
	}
	p.dir = dir
	return p, nil
}

func (p *part) leased(ctx context.Context) context.Context { return leases.WithLease(ctx, p.lease.ID) }

// Commit makes what was copied durable, and gives it its name.
func (p *part) Commit(ctx context.Context) (Committed, error) {
	if err := syncTree(p.dir); err != nil {
		return Committed{}, fmt.Errorf("%s: %w", p.action, err)
	}
	one, err := p.c.commit(p.leased(ctx), partOf(p.name), p.name, p.action)
	p.done = err == nil
	return one, err
}

// Close removes what was not committed. It may be called after the end of the context.
func (p *part) Close(ctx context.Context) (err error) {
	if !p.done {
		err = p.c.RemoveSnapshot(ctx, partOf(p.name))
	}
	p.c.release(ctx, p.lease)
	return err
}

// RemoveCopy removes what an interruption left of a committed snapshot in the making, which nobody may
// be at, and then does as RemoveCommitted.
func (c *Client) RemoveCopy(ctx context.Context, name string) error {
	return errors.Join(c.RemoveSnapshot(ctx, partOf(name)), c.RemoveCommitted(ctx, name))
}

// build makes a committed snapshot of what fill puts into a new directory.
func (c *Client) build(ctx context.Context, name, parent, action string, fill func(dir string) error) (_ Committed, err error) {
	p, err := c.begin(ctx, name, parent, action)
	if err != nil {
		return Committed{}, err
	}
	defer func() { err = errors.Join(err, p.Close(ctx)) }()
	if err := fill(p.dir); err != nil {
		return Committed{}, fmt.Errorf("%s: %w", action, err)
	}
	return p.Commit(ctx)
}
