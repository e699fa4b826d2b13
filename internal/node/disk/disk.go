// Package disk keeps disks of bounded size: each is a sparse image file with an ext4 file system, attached to a loop
// device and mounted. A full one gives ENOSPC inside, for bytes and for inodes, and its neighbours and the host's disk
// are as before. Removing the image gives all of its space back to the host at once; files removed inside give theirs back by discard.
//
// An image appears by one rename, so a crash leaves a whole one or a file that ends in ".making". A mount belongs to the kernel: it
// outlives the server and ends with the machine, so users mount before each use. The package does not know which disks there should be.
//
// Lock order: a stripe, then Store.mu. Both are held over calls to the kernel and to mke2fs, and to no other package.
package disk

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
)

const (
	mib = 1 << 20
	// journalSize is of each file system, in MiB. It is written in full, so that a full disk of the host cannot stop it.
	journalSize = 4
	// bytesPerInode is ext4's usual ratio; inodeSize is taken from the disk for each.
	bytesPerInode, inodeSize = 16 << 10, 256
	minInodes                = 4096
	// maxTemplates bounds the sizes of which an empty image is kept for copies.
	maxTemplates = 8

	// minimum and maximum bound the size of a disk, in bytes.
	minimum = 1 * mib
	maximum = 16 << 40

	// Slack is at most how many bytes more than its size, and a 64th of it, fit on a disk.
	Slack = 4 * mib

	makingSuffix = ".making"
)

// Store makes and mounts disks. It is safe for concurrent use, for different images.
type Store struct {
	dir, mke2 string
	// stripes serialize mounts of one image: two devices of one would destroy it.
	stripes [64]sync.Mutex

	mu    sync.Mutex
	kept  int // +checklocks:mu
	fault error

	spares    chan spare
	spareSize atomic.Int64 // of their images; zero: none are made
}

// Open prepares a directory for templates of images, and finds out whether the machine can have disks.
func Open(dir string) *Store {
	s := &Store{dir: dir, spares: make(chan spare, maxSpares)}
	s.mke2, s.fault = Check()
	if s.fault != nil {
		return s
	}
	for _, name := range globs(dir, "*"+makingSuffix) {
		_ = os.Remove(name) // of an interrupted process
	}
	s.fault = s.sweepSpares()
	s.kept = len(globs(dir, "*.img"))
	return s
}

// Unavailable is a store without disks, for tests.
func Unavailable(why error) *Store { return &Store{fault: why} }

func globs(dir, pattern string) []string {
	found, _ := filepath.Glob(filepath.Join(dir, pattern))
	return found
}

// Check finds mke2fs, and returns why this machine cannot have disks of bounded size.
func Check() (mke2fs string, err error) {
	for _, path := range []string{"mke2fs", "/usr/sbin/mke2fs", "/sbin/mke2fs"} {
		if mke2fs, err = exec.LookPath(path); err == nil {
			break
		}
	}
	if err != nil {
		return "", fmt.Errorf("mke2fs not found; install e2fsprogs: %w", errs.ErrUnavailable)
	}
	if _, err := os.Stat(loopControl); err != nil {
		return "", fmt.Errorf("no loop devices (%s); load the module loop: %w", loopControl, errs.ErrUnavailable)
	}
	known, err := os.ReadFile("/proc/filesystems")
	if err == nil && !strings.Contains(string(known), "\text4\n") && exec.Command("modprobe", "ext4").Run() != nil { //nolint:noctx // short
		return "", fmt.Errorf("the kernel has no ext4: %w", errs.ErrUnavailable)
	}
	return mke2fs, nil
}

// Fault is why the machine cannot have disks; nil if it can.
func (s *Store) Fault() error { return s.fault }

// sizeOf is the size of an image whose files may take that many bytes.
func sizeOf(bytes int64) int64 {
	bytes = min(max(bytes, minimum), maximum)
	size := bytes + inodesOf(bytes)*inodeSize + (journalSize+1)*mib + bytes/256 // inode tables, journal, bitmaps and groups
	return (size + mib - 1) / mib * mib
}

func inodesOf(bytes int64) int64 { return max(bytes/bytesPerInode, minInodes) }

// Mount mounts the disk of an image at a directory; one that is mounted stays. A missing image is made, and one that is too small
// for the bytes grows, at the latest when it is mounted again; a larger one stays as it is.
func (s *Store) Mount(ctx context.Context, image, dir string, bytes int64) error {
	if err := s.mount(ctx, image, dir, bytes); err != nil {
		return errs.Retryable(fmt.Errorf("mount disk %s: %w", dir, err))
	}
	return nil
}

// MountEncryptable is Mount for a disk whose directories the kernel can encrypt.
func (s *Store) MountEncryptable(ctx context.Context, image, dir string, bytes int64) error {
	if s.fault != nil {
		return s.fault
	}
	if _, err := os.Stat(image); errors.Is(err, fs.ErrNotExist) {
		temp := image + makingSuffix
		if err := s.format(ctx, temp, sizeOf(bytes), bytes, "-O", "encrypt"); err != nil {
			return errors.Join(err, removeFile(temp))
		}
		if err := os.Rename(temp, image); err != nil {
			return errors.Join(err, removeFile(temp))
		}
	}
	return s.Mount(ctx, image, dir, bytes)
}

// lock takes the lock of an image.
//
// +checklocksignore
func (s *Store) lock(image string) (unlock func()) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(image))
	m := &s.stripes[h.Sum32()%uint32(len(s.stripes))]
	m.Lock()
	return m.Unlock
}

// Attach mounts the disk of an image that exists, and reports whether it was not.
func (s *Store) Attach(image, dir string) (mounted bool, err error) {
	defer s.lock(image)()
	if mounted, err = Mounted(dir); err != nil || mounted {
		return false, err
	}
	if _, err := attach(image, dir, false); err != nil {
		return false, errs.Retryable(fmt.Errorf("mount disk %s: %w", dir, err))
	}
	return true, nil
}

func (s *Store) mount(ctx context.Context, image, dir string, bytes int64) error {
	if s.fault != nil {
		return s.fault
	}
	defer s.lock(image)()
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return err
	}
	info, err := os.Stat(image)
	if errors.Is(err, fs.ErrNotExist) {
		return s.mountNew(ctx, image, dir, bytes)
	}
	if err != nil {
		return err
	}
	mounted, err := Mounted(dir)
	if err != nil {
		return err
	}
	larger := bytes > 0 && info.Size() < sizeOf(bytes)
	switch {
	case mounted && larger:
		return grow(image, dir, sizeOf(bytes))
	case mounted:
		return nil
	case larger:
		if err := s.growUnmounted(ctx, image, sizeOf(bytes)); err != nil {
			return err
		}
	}
	_, err = attach(image, dir, false)
	return err
}

// mountNew makes an image and mounts its disk.
func (s *Store) mountNew(ctx context.Context, image, dir string, bytes int64) error {
	taken, err := s.takeSpare(image, dir, sizeOf(bytes))
	if err == nil && !taken {
		err = s.make(ctx, image, bytes)
	}
	if err != nil {
		return err
	}
	failpoint.Reach("disk/made")
	if !taken {
		_, err = attach(image, dir, true)
	}
	return err
}

// growUnmounted makes a disk larger that may not be mounted.
func (s *Store) growUnmounted(ctx context.Context, image string, size int64) error {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if device := attached(f); device != nil { // an earlier mount is still in use
		return device.Close()
	}
	tools := filepath.Dir(s.mke2)
	out, err := exec.CommandContext(ctx, filepath.Join(tools, "e2fsck"), "-fp", image).CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || exit.ExitCode() > 1) { // 1: repaired
		return fmt.Errorf("e2fsck: %w: %s", err, out)
	}
	if out, err := exec.CommandContext(ctx, filepath.Join(tools, "resize2fs"), image, fmt.Sprintf("%dk", size>>10)).CombinedOutput(); err != nil {
		return fmt.Errorf("resize2fs: %w: %s", err, out)
	}
	return f.Truncate(size)
}

// make makes an image: a copy of an empty one of its size, if there is room to keep one.
func (s *Store) make(ctx context.Context, image string, bytes int64) error {
	size := sizeOf(bytes)
	template, err := s.template(ctx, size, bytes)
	if err != nil {
		return err
	}
	temp := image + makingSuffix
	if template == "" {
		err = s.format(ctx, temp, size, bytes)
	} else {
		err = copySparse(template, temp)
	}
	if err == nil {
		err = os.Rename(temp, image)
	}
	if err != nil {
		return errors.Join(err, removeFile(temp))
	}
	return nil
}

// template returns an empty image of a size; empty if enough others are kept.
//
// +checklocksignore
func (s *Store) template(ctx context.Context, size, bytes int64) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := filepath.Join(s.dir, fmt.Sprintf("%d.img", size))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if s.kept >= maxTemplates {
		return "", nil
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return "", err
	}
	err := s.format(ctx, path+makingSuffix, size, bytes)
	if err == nil {
		err = os.Rename(path+makingSuffix, path)
	}
	if err != nil {
		return "", errors.Join(err, removeFile(path+makingSuffix))
	}
	s.kept++
	return path, nil
}

func (s *Store) format(ctx context.Context, path string, size, bytes int64, options ...string) error {
	if err := removeFile(path); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(size), f.Close()); errors.Is(err, unix.EFBIG) {
		return errs.Public(errs.ErrInvalid, fmt.Sprintf("%d bytes are more than a file of the data directory can have", size))
	} else if err != nil {
		return err
	}
	args := append(options, "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-I", fmt.Sprint(inodeSize),
		"-N", fmt.Sprint(inodesOf(min(max(bytes, minimum), maximum))), "-J", fmt.Sprintf("size=%d", journalSize),
		"-E", "lazy_itable_init=1,nodiscard", path)
	out, err := exec.CommandContext(ctx, s.mke2, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mke2fs: %w: %s", err, out)
	}
	return nil
}

// Usage is what the files of a mounted disk take, and what they may take. Of what is not used, Free is for all users; some file
// systems reserve the rest, as ext4 does on its own.
type Usage struct{ Used, Total, Free, Files, MaxFiles int64 }

// UsageOf reads the usage of the disk that is mounted at a directory.
func UsageOf(dir string) (Usage, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return Usage{}, errs.Retryable(fmt.Errorf("usage of disk %s: %w", dir, err))
	}
	bytes := func(blocks uint64) int64 { return int64(blocks) * st.Bsize } //nolint:gosec // below 8 EiB
	files := int64(st.Files)                                               //nolint:gosec // as above
	return Usage{
		Used: bytes(st.Blocks - st.Bfree), Total: bytes(st.Blocks), Free: bytes(st.Bavail), Files: files - int64(st.Ffree), MaxFiles: files, //nolint:gosec // as above
	}, nil
}

// Allocated is what an image takes of the host's disk; zero if there is none.
func Allocated(image string) int64 {
	var st unix.Stat_t
	if unix.Stat(image, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
