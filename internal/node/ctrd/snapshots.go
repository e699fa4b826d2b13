package ctrd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
)

// Rootfs is a writable snapshot of an image, and its mounts.
type Rootfs struct {
	Key    string
	mounts []mount.Mount
}

// Parts of a sandbox's snapshots besides that of its first container. IDs have no dash.
const (
	// InitPart is that of its init containers, one after the other.
	InitPart = "init"
	// SidecarPart begins the part of a sidecar, before its name.
	SidecarPart = "sidecar-"
)

// ContainerPart is the part of a container, whose name is empty for the first.
func ContainerPart(name string) string {
	if name == "" {
		return ""
	}
	return SidecarPart + name
}

// PartKey is the key of the snapshot of a part of a sandbox, which is empty for that of its first container.
func PartKey(id, part string) string {
	if part == "" {
		return id
	}
	return id + "-" + part
}

// SandboxOf is the ID of the sandbox that a snapshot belongs to, and the part, empty for its first container.
func SandboxOf(key string) (id, part string) {
	if id, part, _ = strings.Cut(key, "-"); part == InitPart || strings.HasPrefix(part, SidecarPart) {
		return id, part
	}
	return key, ""
}

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
		c.images.drop(img.Digest)
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
			if dir, ok := strings.CutPrefix(o, upperOption); ok {
				return dir, true
			}
		}
	}
	return "", false
}

// Over is the snapshot with its writes in a directory of its own, beside the overlay's work directory, instead of containerd's. It
// makes both. An empty name changes nothing.
func (r Rootfs) Over(dir string) (Rootfs, error) {
	if dir == "" {
		return r, nil
	}
	own, ok := r.upper()
	if !ok {
		return Rootfs{}, fmt.Errorf("snapshot %s: not writable: %w", r.Key, errs.ErrInvalid)
	}
	upper, work := UpperIn(dir), filepath.Join(dir, "work")
	err := errors.Join(os.MkdirAll(upper, 0o755), os.MkdirAll(work, 0o711))
	var like unix.Stat_t
	if err == nil {
		err = unix.Stat(own, &like)
	}
	if err == nil {
		err = errors.Join(os.Chown(upper, int(like.Uid), int(like.Gid)), unix.Chmod(upper, like.Mode&0o7777))
	}
	if err != nil {
		return Rootfs{}, fmt.Errorf("prepare %s for snapshot %s: %w", dir, r.Key, err)
	}
	out := Rootfs{Key: r.Key}
	for _, m := range r.mounts {
		if m.Source == own {
			m.Source = upper
		}
		m.Options = slices.Clone(m.Options)
		for i, o := range m.Options {
			switch {
			case strings.HasPrefix(o, upperOption):
				m.Options[i] = upperOption + upper
			case strings.HasPrefix(o, "workdir="):
				m.Options[i] = "workdir=" + work
			}
		}
		if m.Type == overlayType {
			m.Options = append(m.Options, sameInodes)
		}
		out.mounts = append(out.mounts, m)
	}
	return out, nil
}

// UpperIn is the directory with the writes to a snapshot in a directory that was given to Over.
func UpperIn(dir string) string { return filepath.Join(dir, "fs") }

const (
	overlayType = "overlay"
	upperOption = "upperdir="
	// sameInodes has a file of the image keep its inode number when it is first written or linked, although the upper directory is on another
	// file system. Else gVisor shows its links as different files, and git refuses to clone from the image.
	sameInodes = "xino=on"
)

// Mount mounts the snapshot at a directory, without access to devices. With setuid the kernel of this host lets its programs
// change their user, which those of a gVisor sandbox do not need.
func (r Rootfs) Mount(dir string, setuid bool) error {
	flags := uintptr(unix.MS_NODEV)
	if !setuid {
		flags |= unix.MS_NOSUID
	}
	err := mount.All(r.mounts, dir)
	if err == nil { // the flags of a bind mount can only be set afterwards
		err = unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|flags, "")
	}
	if err != nil {
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

// RemoveSnapshot removes a snapshot. A missing one is success. Its files go first: containerd takes a descriptor and a buffer
// for each level of directories, and programs in a sandbox decide how many there are.
func (c *Client) RemoveSnapshot(ctx context.Context, key string) error {
	ctx, cancel := c.removal(context.WithoutCancel(ctx))
	defer cancel()
	action := fmt.Sprintf("remove snapshot %s", key)
	mounts, err := c.api.SnapshotService(snapshotter).Mounts(ctx, key)
	if err == nil {
		if dir, ok := (Rootfs{mounts: mounts}).upper(); ok {
			if err := volumetree.RemoveAll(ctx, dir); err != nil {
				return fmt.Errorf("%s: %w", action, err)
			}
		}
	} // else it is committed, or missing
	err = c.api.SnapshotService(snapshotter).Remove(ctx, key)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return kind(action, err)
}

// SnapshotUsage returns the bytes written to a writable snapshot. Unlike containerd it measures trees of any depth.
func (c *Client) SnapshotUsage(ctx context.Context, key string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	action := fmt.Sprintf("measure snapshot %s", key)
	mounts, err := c.api.SnapshotService(snapshotter).Mounts(ctx, key)
	if err != nil {
		return 0, kind(action, err)
	}
	dir, ok := (Rootfs{mounts: mounts}).upper()
	if !ok {
		return 0, fmt.Errorf("%s: not writable: %w", action, errs.ErrInvalid)
	}
	bytes, err := durable.Usage(ctx, dir)
	if err != nil {
		return 0, kind(action, errs.Retryable(err))
	}
	return bytes, nil
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
