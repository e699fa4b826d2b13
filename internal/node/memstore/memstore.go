// Package memstore has the directories of the memory images of one node: of its stored sandboxes and of its checkpoints. They are
// plain ones, or encrypted by the kernel (fscrypt) with keys of a file. It writes, reads and removes no image.
//
// A key's directories are named after it, and the kernel encrypts all that is created below them. So images that were written in the clear,
// or with an earlier key, are read as before, and each moves to the present key when it is written the next time. Directories are
// on the data directory's file system where that can encrypt, otherwise on an ext4 image of their own:
//
//	<Dir>/memory/<sandbox>, <Dir>/checkpoints/<UID>/memory                   in the clear
//	<Dir>/encrypted/{sandboxes,checkpoints}/<key's identifier>/<name>        encrypted
//	<Dir>/encrypted.img                                                      mounted at <Dir>/encrypted
//
// The mount and the keys in it belong to the kernel: they outlive the server, whose sandboxes may still read pages.
package memstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/keyfile"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// keySize is the size of a key in bytes.
const keySize = 32

// The kinds of images, as directories.
const (
	sandboxes   = "sandboxes"
	checkpoints = "checkpoints"
)

// Config configures a Store.
type Config struct {
	// Dir is the node's data directory. Plain has the memory of stored sandboxes in the clear.
	Dir, Plain string
	// Encrypt encrypts new images. Without it, encrypted ones are still read.
	Encrypt bool
	// KeyFile has one or more keys of 32 bytes, one after the other; the first is for new images. A missing one is made.
	KeyFile string
	// Disks makes and mounts the image.
	Disks *disk.Store
}

// Store finds images by name. It is safe for concurrent use.
type Store struct {
	cfg Config
	// keys are the identifiers of the keys whose directories exist, that for new images first.
	keys atomic.Pointer[[]string]
}

// New starts nothing. Until Open has returned, the store has plain directories only.
func New(cfg Config) *Store {
	s := &Store{cfg: cfg}
	s.keys.Store(&[]string{})
	return s
}

func (s *Store) root() string  { return rootOf(s.cfg.Dir) }
func (s *Store) image() string { return s.root() + imageSuffix }

const imageSuffix = ".img"

func rootOf(dir string) string { return filepath.Join(dir, "encrypted") }

// Discard removes all encrypted memory of a node's data directory, for which it needs no key. No node may use it.
func Discard(dir string) error {
	root := rootOf(dir)
	if err := disk.Discard(root); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(root), os.RemoveAll(root+imageSuffix)); err != nil {
		return fmt.Errorf("remove encrypted memory: %w", err)
	}
	return nil
}

// Open mounts the file system of encrypted images, gives the kernel their keys, and removes empty directories of earlier keys. A
// missing key of an existing image is an errs.ErrInvalid that names the file; the image stays as it is.
func (s *Store) Open(ctx context.Context) error {
	if _, err := os.Stat(s.root()); errors.Is(err, fs.ErrNotExist) && !s.cfg.Encrypt {
		return nil
	}
	if err := s.mount(ctx); err != nil {
		return err
	}
	identifiers, err := s.unlock()
	if err != nil {
		return err
	}
	if s.cfg.Encrypt {
		if err := s.make(identifiers[0]); err != nil {
			return fmt.Errorf("encrypt stored memory in %s: %w", s.root(), err)
		}
	}
	s.keys.Store(&identifiers)
	return nil
}

// mount provides a file system that encrypts.
func (s *Store) mount(ctx context.Context) error {
	if err := os.MkdirAll(s.root(), 0o700); err != nil {
		return fmt.Errorf("make directory of encrypted memory: %w", err)
	}
	if _, err := os.Stat(s.image()); errors.Is(err, fs.ErrNotExist) {
		if can, err := encrypts(s.root()); err != nil || can {
			return err
		}
	}
	u, err := disk.UsageOf(s.cfg.Dir)
	if err != nil {
		return err
	}
	return s.cfg.Disks.MountEncryptable(ctx, s.image(), s.root(), u.Total)
}

// unlock gives all keys of the file to the kernel, and returns the identifiers of those with directories. If images are encrypted,
// the first is the file's first, which may have none yet.
func (s *Store) unlock() (identifiers []string, err error) {
	present, err := s.present()
	if err != nil {
		return nil, err
	}
	keys, err := s.readKeys(len(present) == 0)
	if err != nil {
		return nil, err
	}
	for i, key := range keys {
		id, err := addKey(s.root(), key)
		if err != nil {
			return nil, fmt.Errorf("give the key of stored memory to the kernel: %w", err)
		}
		if at := slices.Index(present, id); at >= 0 {
			present = slices.Delete(present, at, at+1)
		} else if i > 0 || !s.cfg.Encrypt {
			continue
		}
		identifiers = append(identifiers, id)
	}
	if len(present) > 0 {
		return nil, s.missing("it lacks key "+present[0], present[0])
	}
	return identifiers, nil
}

// present returns the identifiers of the keys of existing images. Empty directories are removed.
func (s *Store) present() (identifiers []string, err error) {
	for _, kind := range []string{sandboxes, checkpoints} {
		entries, err := os.ReadDir(filepath.Join(s.root(), kind))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("list encrypted memory: %w", err)
		}
		for _, e := range entries {
			if unix.Rmdir(filepath.Join(s.root(), kind, e.Name())) != nil && !slices.Contains(identifiers, e.Name()) { // it has images
				identifiers = append(identifiers, e.Name())
			}
		}
	}
	return identifiers, nil
}

// readKeys reads the file of keys, or makes one if no image needs another.
func (s *Store) readKeys(may bool) ([][]byte, error) {
	file := keyfile.File{Path: s.cfg.KeyFile, What: "key of stored memory", Size: keySize}
	keys, err := file.Read()
	switch {
	case !errors.Is(err, fs.ErrNotExist):
		return keys, err
	case !may:
		return nil, s.missing("there is no such file", "*")
	case !s.cfg.Encrypt:
		return nil, nil
	}
	return file.Open()
}

func (s *Store) missing(what, id string) error {
	return fmt.Errorf("key of stored memory %s: %s, which the images in %s need; restore it from a backup, or remove these directories to give up the memory: %w",
		s.cfg.KeyFile, what, filepath.Join(s.root(), "*", id), errs.ErrInvalid)
}

// make creates the directories of a key, and sees that files in them can be written.
func (s *Store) make(id string) error {
	for _, kind := range []string{sandboxes, checkpoints} {
		dir := filepath.Join(s.root(), kind, id)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if err := encrypt(dir, id); err != nil {
			return err
		}
	}
	if err := durable.CheckWrites(filepath.Join(s.root(), sandboxes, id)); err != nil {
		return err
	}
	return durable.SyncFilesystem(s.root())
}

// Describe returns whether new images are encrypted, with what, and how many earlier ones are not.
func (s *Store) Describe() (state, detail string) {
	if !s.cfg.Encrypt {
		return "unencrypted", "memoryEncryption is false, or auto and the kernel has no AES instructions"
	}
	ofSandboxes, _ := filepath.Glob(filepath.Join(s.cfg.Plain, "*"))
	ofCheckpoints, _ := filepath.Glob(s.plainCheckpoint("*"))
	if n := len(ofSandboxes) + len(ofCheckpoints); n > 0 {
		return "encrypted", fmt.Sprintf("AES-256-XTS; %d earlier images are in the clear", n)
	}
	return "encrypted", "AES-256-XTS"
}

// Sandbox is the directory of the memory of a stored sandbox, or that for it.
func (s *Store) Sandbox(id string) string {
	return s.find(sandboxes, id, filepath.Join(s.cfg.Plain, id))
}

// Checkpoint is the directory of the memory of a checkpoint, or that for it.
func (s *Store) Checkpoint(uid string) string {
	return s.find(checkpoints, uid, s.plainCheckpoint(uid))
}

func (s *Store) plainCheckpoint(uid string) string {
	return filepath.Join(s.cfg.Dir, "checkpoints", uid, "memory")
}

// find returns where an image is, complete or partial, or where a new one belongs.
func (s *Store) find(kind, name, plain string) string {
	var paths []string
	for _, dir := range s.dirs(kind) {
		paths = append(paths, filepath.Join(dir, name))
	}
	paths = append(paths, plain)
	for _, path := range paths {
		if exists(path) || exists(path+memimage.PartSuffix) {
			return path
		}
	}
	if s.cfg.Encrypt {
		return paths[0]
	}
	return plain
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func (s *Store) dirs(kind string) (dirs []string) {
	for _, id := range *s.keys.Load() {
		dirs = append(dirs, filepath.Join(s.root(), kind, id))
	}
	return dirs
}

// SandboxDirs are the directories with the memory of stored sandboxes. One may be missing.
func (s *Store) SandboxDirs() []string { return append(s.dirs(sandboxes), s.cfg.Plain) }

// CheckpointDirs are the directories with encrypted memory of checkpoints. One may be missing.
func (s *Store) CheckpointDirs() []string { return s.dirs(checkpoints) }
