package ctrd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
)

// labelCommitted marks our committed snapshots, unlike layers of images.
const labelCommitted = "barchan.dev/committed"

// MaxDepth bounds the committed snapshots above an image: each slows down every file lookup, and
// the kernel mounts at most 500 layers.
const MaxDepth = 64

// partSuffix marks the keys of incomplete committed snapshots. Names of containers, with which those of checkpoints end, have no
// dot.
const partSuffix = ".part"

// partTime is how long a lease keeps an incomplete one from collection.
const partTime = 6 * time.Hour

// Committed is an immutable snapshot that writable ones may start from.
type Committed struct {
	Name string
	// Parent is the snapshot below: another one, or a layer of an image. It may be empty.
	Parent string
	// Size is its bytes beyond its parent.
	Size    int64
	Created time.Time
}

func (c *Client) commit(ctx context.Context, key, name, action string) (Committed, error) {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	err := c.api.SnapshotService(snapshotter).Commit(ctx, name, key, snapshots.WithLabels(map[string]string{
		labelRoot: time.Now().UTC().Format(time.RFC3339), labelCommitted: "true",
	}))
	if err != nil {
		return Committed{}, kind(action, err)
	}
	return c.committed(ctx, name)
}

// preparePart creates a writable snapshot that only the context's lease keeps.
func (c *Client) preparePart(ctx context.Context, key, parent string) (Rootfs, error) {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	mounts, err := c.api.SnapshotService(snapshotter).Prepare(ctx, key, parent)
	return Rootfs{Key: key, mounts: mounts}, err
}

// lease keeps objects created with it from collection until release, or for partTime after a crash.
func (c *Client) lease(ctx context.Context) (leases.Lease, error) {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	l, err := c.api.LeasesService().Create(ctx, leases.WithRandomID(), leases.WithExpiration(partTime))
	return l, kind("create lease", err)
}

func (c *Client) release(ctx context.Context, l leases.Lease) {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	_ = c.api.LeasesService().Delete(ctx, l)
}

// PrepareFrom creates a writable snapshot of a committed one under a key, or finds the existing
// one. Like that of Prepare it stays until RemoveSnapshot, even without the committed one.
func (c *Client) PrepareFrom(ctx context.Context, key, name string) (Rootfs, error) {
	action := fmt.Sprintf("create snapshot %s of %s", key, name)
	if _, err := c.committed(ctx, name); err != nil {
		return Rootfs{}, kind(action, err)
	}
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	labels := map[string]string{labelRoot: time.Now().UTC().Format(time.RFC3339)}
	mounts, err := c.api.SnapshotService(snapshotter).Prepare(ctx, key, name, snapshots.WithLabels(labels))
	if errdefs.IsAlreadyExists(err) {
		return c.Snapshot(ctx, key)
	}
	if err != nil {
		return Rootfs{}, kind(action, err)
	}
	return Rootfs{Key: key, mounts: mounts}, nil
}

// RemoveCommitted removes a committed snapshot, or has containerd's collector remove it after the
// last snapshot that started from it; until then its name is taken. A missing one is success.
func (c *Client) RemoveCommitted(ctx context.Context, name string) error {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	action := fmt.Sprintf("remove committed snapshot %s", name)
	info, err := c.api.SnapshotService(snapshotter).Stat(ctx, name)
	if errdefs.IsNotFound(err) {
		return nil
	} else if err != nil {
		return kind(action, err)
	}
	if info.Labels[labelCommitted] == "" {
		return fmt.Errorf("%s: not a committed snapshot: %w", action, errs.ErrInvalid)
	}
	err = c.api.SnapshotService(snapshotter).Remove(ctx, name)
	if errdefs.IsFailedPrecondition(err) {
		delete(info.Labels, labelRoot)
		_, err = c.api.SnapshotService(snapshotter).Update(ctx, info, "labels")
	}
	if errdefs.IsNotFound(err) {
		return nil
	}
	return kind(action, err)
}

// Committed lists the committed snapshots that were not removed, by name.
func (c *Client) Committed(ctx context.Context) (all []Committed, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	var infos []snapshots.Info
	err = c.api.SnapshotService(snapshotter).Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if info.Kind == snapshots.KindCommitted && info.Labels[labelCommitted] != "" && info.Labels[labelRoot] != "" {
			infos = append(infos, info)
		}
		return nil
	})
	for _, info := range infos {
		var one Committed
		if one, err = c.describe(ctx, info); errdefs.IsNotFound(err) {
			err = nil // removed meanwhile
			continue
		} else if err != nil {
			break
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b Committed) int { return strings.Compare(a.Name, b.Name) })
	return all, kind("list committed snapshots", err)
}

// committed finds a committed snapshot that was not removed.
func (c *Client) committed(ctx context.Context, name string) (Committed, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	info, err := c.stat(ctx, name)
	if err != nil {
		return Committed{}, kind("find committed snapshot "+name, err)
	}
	if info.Kind != snapshots.KindCommitted || info.Labels[labelCommitted] == "" || info.Labels[labelRoot] == "" {
		return Committed{}, fmt.Errorf("no committed snapshot %s: %w", name, errs.ErrNotFound)
	}
	one, err := c.describe(ctx, info)
	return one, kind("measure committed snapshot "+name, err)
}

func (c *Client) describe(ctx context.Context, info snapshots.Info) (Committed, error) {
	usage, err := c.api.SnapshotService(snapshotter).Usage(ctx, info.Name)
	return Committed{Name: info.Name, Parent: info.Parent, Size: usage.Size, Created: info.Created}, err
}

func (c *Client) stat(ctx context.Context, name string) (snapshots.Info, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	return c.api.SnapshotService(snapshotter).Stat(ctx, name)
}

// checkDepth counts our committed snapshots, from one down to the image.
func (c *Client) checkDepth(ctx context.Context, name string) error {
	for depth := 1; name != ""; depth++ {
		info, err := c.stat(ctx, name)
		if err != nil {
			return err
		}
		if info.Labels[labelCommitted] == "" {
			return nil
		}
		if depth >= MaxDepth {
			return fmt.Errorf("%d stacked committed snapshots, the maximum: %w", depth, errs.ErrExhausted)
		}
		name = info.Parent
	}
	return nil
}

// ExportCommitted writes a committed snapshot's difference from its parent as an uncompressed layer
// of an OCI image. What an image cannot contain is an errs.ErrInvalid that names it; sockets are
// omitted.
func (c *Client) ExportCommitted(ctx context.Context, name string, w io.Writer) (err error) {
	action := fmt.Sprintf("export snapshot %s", name)
	if _, err := c.committed(ctx, name); err != nil {
		return kind(action, err)
	}
	l, err := c.lease(ctx)
	if err != nil {
		return kind(action, err)
	}
	defer c.release(ctx, l)
	// A snapshot of it has its directory as the first of the lower ones.
	key := name + "-view-" + time.Now().UTC().Format("150405.000000000")
	view, err := c.preparePart(leases.WithLease(ctx, l.ID), key, name)
	if err != nil {
		return kind(action, err)
	}
	defer func() { err = errors.Join(err, c.RemoveSnapshot(ctx, key)) }()
	dirs := view.lowers()
	if len(dirs) == 0 {
		return fmt.Errorf("%s: directory unknown: %w", action, errs.ErrUnavailable)
	}
	if err := filetree.WriteLayer(ctx, w, dirs[0]); err != nil {
		return fmt.Errorf("%s: %w", action, err)
	}
	return nil
}

// ImportCommitted creates a committed snapshot from a layer, on an image. An unreadable layer is an
// errs.ErrInvalid, a taken name an errs.ErrConflict. Attributes that only the kernel may set are
// ignored. The next call, or later containerd's collector, removes leftovers of a failed import.
func (c *Client) ImportCommitted(ctx context.Context, name string, img Image, r io.Reader) (_ Committed, err error) {
	action := "import snapshot " + name
	p, err := c.begin(ctx, name, img.chain, action)
	if err != nil {
		return Committed{}, err
	}
	defer func() { err = errors.Join(err, p.Close(ctx)) }()
	if err := filetree.ApplyLayer(ctx, p.dir, r); err != nil {
		return Committed{}, fmt.Errorf("%s: %w", action, err)
	}
	return p.Commit(ctx)
}

// upper is the directory with the writes to the snapshot; on an image without layers it is the only
// one.
func (r Rootfs) upper() (string, bool) {
	if dir, ok := r.UpperDir(); ok {
		return dir, true
	}
	if len(r.mounts) == 1 && r.mounts[0].Type == "bind" && !r.mounts[0].ReadOnly() {
		return r.mounts[0].Source, true
	}
	return "", false
}

// lowers are the directories below the snapshot, the uppermost first.
func (r Rootfs) lowers() []string {
	for _, m := range r.mounts {
		for _, o := range m.Options {
			if dirs, ok := strings.CutPrefix(o, "lowerdir="); ok {
				return strings.Split(dirs, ":")
			}
		}
	}
	return nil
}
