// Package projection writes the files of projected volumes: those of Secrets, ConfigMaps and a Pod's own fields. A
// volume changes as a whole, by kubelet's scheme:
//
//	volume/..HASH/file   the files; HASH is that of all of them
//	volume/..data     →  ..HASH, replaced by a rename
//	volume/file       →  ..data/file
//
// kubelet's directory has a time for its name. The hash gives equal files the same paths after a reboot, where the
// memory of a sandbox on disk may have them open.
//
// It resolves no references: that is package podsource. It keeps no state and has no locks: callers serialize the
// writes of a volume.
package projection

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/podsource"
)

const (
	dataLink = "..data"
	newLink  = "..data_tmp"
	// tmpfsBytes limits the memory of a sandbox's projected volumes: while they change, there are two versions, and
	// copies for subPath.
	tmpfsBytes = 4 * podsource.MaxVolumeBytes
)

// Mount mounts memory on a directory, which it makes, unless it is mounted already.
func Mount(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("mount projected volumes: %w", err)
	}
	if Mounted(dir) {
		return nil
	}
	err := unix.Mount("barchan", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, fmt.Sprintf("mode=755,noswap,size=%d,nr_inodes=20000", tmpfsBytes))
	if errors.Is(err, unix.EINVAL) { // noswap is newer than some kernels
		err = unix.Mount("barchan", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, fmt.Sprintf("mode=755,size=%d,nr_inodes=20000", tmpfsBytes))
	}
	if err != nil {
		return fmt.Errorf("mount projected volumes: %w", err)
	}
	return nil
}

// Mounted reports whether a directory is a mount point, as after Mount.
func Mounted(dir string) bool {
	var self, parent unix.Stat_t
	return unix.Stat(dir, &self) == nil && unix.Stat(filepath.Dir(dir), &parent) == nil && self.Dev != parent.Dev
}

// Write makes a volume have these files and no others. group owns them if it is not 0, and may then read them.
func Write(dir string, files map[string]podsource.File, group int64) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write volume: %w", err)
	}
	now := ".." + hashOf(files, group)
	if was, err := os.Readlink(filepath.Join(dir, dataLink)); err != nil || was != now {
		if err := writeAll(filepath.Join(dir, now), files, group); err != nil {
			return fmt.Errorf("write volume: %w", err)
		}
		if err := relink(dir, now); err != nil {
			return fmt.Errorf("write volume: %w", err)
		}
	}
	if err := tidy(dir, now, files); err != nil { // also after a process that ended before it
		return fmt.Errorf("write volume: %w", err)
	}
	return nil
}

func hashOf(files map[string]podsource.File, group int64) string {
	h := sha256.New()
	_ = binary.Write(h, binary.LittleEndian, group) // a hash takes all writes
	for _, name := range slices.Sorted(maps.Keys(files)) {
		f := files[name]
		fmt.Fprintf(h, "%q %o %d\n", name, f.Mode, len(f.Data))
		_, _ = h.Write(f.Data)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

func writeAll(dir string, files map[string]podsource.File, group int64) error {
	if err := os.RemoveAll(dir); err != nil { // of a process that ended while it wrote
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for name, f := range files {
		to, bits := filepath.Join(dir, name), fs.FileMode(f.Mode) //nolint:gosec // checked: 0 to 0777
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(to, f.Data, 0o600); err != nil {
			return err
		}
		if group != 0 {
			bits |= 0o440
			if err := os.Chown(to, 0, int(group)); err != nil {
				return err
			}
		}
		if err := os.Chmod(to, bits); err != nil {
			return err
		}
	}
	return nil
}

func relink(dir, to string) error {
	temporary := filepath.Join(dir, newLink)
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(to, temporary); err != nil {
		return err
	}
	return os.Rename(temporary, filepath.Join(dir, dataLink))
}

// tidy makes the links that users see, and removes those of former files and the former files themselves.
func tidy(dir, now string, files map[string]podsource.File) error {
	keep := map[string]bool{now: true, dataLink: true}
	for name := range files {
		first, _, _ := strings.Cut(name, "/")
		if keep[first] {
			continue
		}
		keep[first] = true
		err := os.Symlink(filepath.Join(dataLink, first), filepath.Join(dir, first))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !keep[e.Name()] {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// Copy copies a file or directory of a volume to a path of its own, for a mount of it that stays as it is. An existing
// copy is kept. Its error is an fs.ErrNotExist if the volume lacks the path.
func Copy(volume, sub, to string) error {
	if _, err := os.Lstat(to); err == nil {
		return nil
	}
	from, err := filepath.EvalSymlinks(filepath.Join(volume, sub))
	if err != nil {
		return fmt.Errorf("path %q of volume: %w", sub, err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return fmt.Errorf("copy of volume: %w", err)
	}
	partial := to + ".new"
	if err := os.RemoveAll(partial); err != nil {
		return fmt.Errorf("copy of volume: %w", err)
	}
	if err := copyTree(from, partial); err != nil {
		return fmt.Errorf("copy of volume: %w", err)
	}
	return os.Rename(partial, to)
}

func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		into := filepath.Join(to, rel)
		if d.IsDir() {
			return os.Mkdir(into, 0o755)
		}
		var info unix.Stat_t
		if err := unix.Lstat(path, &info); err != nil {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := os.WriteFile(into, content, 0o600); err != nil {
			return err
		}
		if err := os.Chown(into, 0, int(info.Gid)); err != nil {
			return err
		}
		return os.Chmod(into, fs.FileMode(info.Mode&0o777))
	})
}
