package disk

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/durable"
)

// Sandbox has the disks of one sandbox: one for the writes to its root and its scratch directories, and one for each volume claim.
//
//	Dir/disk.img      mounted at Dir/disk: root, <part> of each other container, scratch/<name>
//	Claims/.<claim>   mounted at Claims/<claim>: data
//
// Without Bytes it has none, as sandboxes from before disks were bounded: all methods then do nothing, and the directories are plain ones.
type Sandbox struct {
	Store *Store
	// Dir has the files of the sandbox, ClaimsDir those that outlive them.
	Dir, ClaimsDir string
	// Bytes bounds the files of root and scratch directories; zero: nothing does. Sizes are of the claims.
	Bytes int64
	Sizes map[string]int64
}

func (s *Sandbox) image() string { return filepath.Join(s.Dir, "disk.img") }
func (s *Sandbox) at() string    { return filepath.Join(s.Dir, "disk") }

// Writes is the directory of the writes to the root file system of a container; part is empty for the first one. Empty: containerd has
// them.
func (s *Sandbox) Writes(part string) string {
	if s.Bytes == 0 {
		return ""
	}
	return filepath.Join(s.at(), cmp.Or(part, "root"))
}

// Scratch is the directory of a scratch volume.
func (s *Sandbox) Scratch(name string) string {
	if s.Bytes == 0 {
		return filepath.Join(s.Dir, "volumes", name)
	}
	return filepath.Join(s.at(), "scratch", name)
}

// Claim is the directory of a volume claim.
func (s *Sandbox) Claim(name string) string {
	if s.Bytes == 0 {
		return filepath.Join(s.ClaimsDir, name)
	}
	return filepath.Join(s.ClaimsDir, name, "data")
}

// Mount makes and mounts all disks that are not.
func (s *Sandbox) Mount(ctx context.Context) error {
	if s.Bytes == 0 {
		return nil
	}
	if err := os.MkdirAll(s.Dir, 0o711); err != nil {
		return err
	}
	if err := s.Store.Mount(ctx, s.image(), s.at(), s.Bytes); err != nil {
		return err
	}
	for name, bytes := range s.Sizes {
		at := filepath.Join(s.ClaimsDir, name)
		if err := os.MkdirAll(at, 0o711); err != nil {
			return err
		}
		if err := s.Store.Mount(ctx, filepath.Join(s.ClaimsDir, "."+name), at, cmp.Or(bytes, s.Bytes)); err != nil {
			return err
		}
	}
	return nil
}

// Sync makes all writes durable.
func (s *Sandbox) Sync() error { return s.each(durable.SyncFilesystem) }

// Unmount unmounts all disks, whose files stay.
func (s *Sandbox) Unmount() error { return s.each(Unmount) }

func (s *Sandbox) each(do func(dir string) error) error {
	if s.Bytes == 0 {
		return nil
	}
	err := do(s.at())
	for name := range s.Sizes {
		err = errors.Join(err, do(filepath.Join(s.ClaimsDir, name)))
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Discard unmounts the disks of a sandbox that is being removed, also of one whose row is lost.
func (s *Sandbox) Discard() error { return errors.Join(Discard(s.at()), DiscardBelow(s.ClaimsDir)) }

// Used is what the root and the scratch directories take, in bytes. Of an unmounted disk it is what the image takes.
func (s *Sandbox) Used() (int64, error) {
	if mounted, err := Mounted(s.at()); err != nil || !mounted {
		return Allocated(s.image()), err
	}
	u, err := UsageOf(s.at())
	return u.Used, err
}
