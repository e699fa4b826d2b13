package ctrd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Rootfs is a writable snapshot of an image, and its mounts.
type Rootfs struct {
	Key    string
	mounts []mount.Mount
}

// initSuffix ends the key of the snapshot of a sandbox's init container. IDs have no dash.
const initSuffix = "-init"

// InitKey is the key of the snapshot that a sandbox's init containers have, one after the other.
func InitKey(id string) string { return id + initSuffix }

// SandboxOf is the ID of the sandbox that a snapshot belongs to.
func SandboxOf(key string) string { return strings.TrimSuffix(key, initSuffix) }

// Prepare creates a writable snapshot of an image under a key, or finds the existing one. It stays
// until RemoveSnapshot, even without the image. The end of the context does not interrupt it: a
// later removal of the snapshot must not be overtaken by its creation.
func (c *Client) Prepare(ctx context.Context, key string, img Image) (Rootfs, error) {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	labels := map[string]string{labelRoot: time.Now().UTC().Format(time.RFC3339)}
	mounts, err := c.api.SnapshotService(snapshotter).Prepare(ctx, key, img.chain, snapshots.WithLabels(labels))
	if errdefs.IsAlreadyExists(err) {
		return c.Snapshot(ctx, key)
	}
	if errdefs.IsNotFound(err) {
		// The image and its layers were removed after the lookup.
		c.images.drop()
		err = fmt.Errorf("image %q is no longer unpacked: %w: %w", img.Ref, err, errs.ErrUnavailable)
	}
	if err != nil {
		return Rootfs{}, kind(fmt.Sprintf("create snapshot %s", key), err)
	}
	return Rootfs{Key: key, mounts: mounts}, nil
}

// Snapshot finds a writable snapshot by its key.
func (c *Client) Snapshot(ctx context.Context, key string) (Rootfs, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	mounts, err := c.api.SnapshotService(snapshotter).Mounts(ctx, key)
	if err != nil {
		return Rootfs{}, kind(fmt.Sprintf("find snapshot %s", key), err)
	}
	return Rootfs{Key: key, mounts: mounts}, nil
}

// UpperDir is the directory with exactly the writes to the snapshot.
func (r Rootfs) UpperDir() (string, bool) {
	for _, m := range r.mounts {
		for _, o := range m.Options {
			if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
				return dir, true
			}
		}
	}
	return "", false
}

// Mount mounts the snapshot at a directory.
func (r Rootfs) Mount(dir string) error {
	if err := mount.All(r.mounts, dir); err != nil {
		return fmt.Errorf("mount snapshot %s at %s: %w", r.Key, dir, err)
	}
	return nil
}

// Unmount removes all mounts at a directory. None is success.
func Unmount(dir string) error {
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for {
		switch err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		case err != nil:
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
}

// RemoveSnapshot removes a snapshot. A missing one is success.
func (c *Client) RemoveSnapshot(ctx context.Context, key string) error {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	err := c.api.SnapshotService(snapshotter).Remove(ctx, key)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return kind(fmt.Sprintf("remove snapshot %s", key), err)
}

// SnapshotUsage returns the bytes written to a snapshot.
func (c *Client) SnapshotUsage(ctx context.Context, key string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	usage, err := c.api.SnapshotService(snapshotter).Usage(ctx, key)
	if err != nil {
		return 0, kind(fmt.Sprintf("measure snapshot %s", key), err)
	}
	return usage.Size, nil
}

// Snapshots lists the keys of writable snapshots.
func (c *Client) Snapshots(ctx context.Context) (keys []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	err = c.api.SnapshotService(snapshotter).Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if info.Kind == snapshots.KindActive && info.Labels[labelRoot] != "" {
			keys = append(keys, info.Name)
		}
		return nil
	})
	return keys, kind("list snapshots", err)
}
