package disk

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	loopControl = "/dev/loop-control"
	// maxAttempts bounds the tries for a free loop device, for which others on the machine compete.
	maxAttempts = 64
	// mountFlags keep setuid bits and devices without effect for the host. noinit_itable: the tables of a sparse file are zero.
	mountFlags   = unix.MS_NOATIME | unix.MS_NOSUID | unix.MS_NODEV
	mountOptions = "discard,noinit_itable,errors=remount-ro"

	ext4Shutdown  = 0x8004587d // EXT4_IOC_SHUTDOWN
	shutdownNoLog = 2          // EXT4_GOING_FLAGS_NOLOGFLUSH
	ext4Resize    = 0x40086610 // EXT4_IOC_RESIZE_FS
)

// Mounted reports whether a directory is a mount point of its own.
func Mounted(dir string) (bool, error) {
	var at, above unix.Stat_t
	if err := unix.Lstat(dir, &at); errors.Is(err, unix.ENOENT) {
		return false, nil
	} else if err != nil {
		return false, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if err := unix.Lstat(filepath.Dir(dir), &above); err != nil {
		return false, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	return at.Dev != above.Dev, nil
}

// attach mounts an image. Two devices of one image would destroy it, so the device of an earlier mount that is
// still in use, maybe by a process that ends, is taken again; a fresh image has none.
func attach(image, dir string, fresh bool) (name string, err error) {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	var device *os.File
	if !fresh {
		device = attached(f)
	}
	if device == nil {
		if device, err = newDevice(f); err != nil {
			return "", fmt.Errorf("attach loop device: %w", err)
		}
	}
	defer func() { _ = device.Close() }() // the mount holds it; without one it detaches itself
	if err := unix.Mount(device.Name(), dir, "ext4", mountFlags, mountOptions); err != nil {
		return "", fmt.Errorf("mount %s: %w", device.Name(), err)
	}
	return device.Name(), nil
}

// attached opens the loop device of an image; nil if there is none.
func attached(image *os.File) *os.File {
	for _, b := range globs("/sys/block", "loop*/loop/backing_file") {
		text, err := os.ReadFile(b)
		if err != nil || strings.TrimSpace(string(text)) != image.Name() {
			continue // detached meanwhile, or another's
		}
		device, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(filepath.Dir(b))), os.O_RDWR, 0)
		if err != nil {
			continue
		}
		if same, err := backs(device, image); err == nil && same { // open, it stays attached
			return device
		}
		_ = device.Close()
	}
	return nil
}

// backs reports whether a loop device has an image.
func backs(device, image *os.File) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil {
		return false, err
	}
	info, err := unix.IoctlLoopGetStatus64(int(device.Fd()))
	if err != nil {
		return false, err
	}
	return info.Inode == st.Ino, nil
}

// newDevice attaches an image to a free loop device, which detaches itself with the last user.
func newDevice(image *os.File) (*os.File, error) {
	control, err := os.OpenFile(loopControl, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = control.Close() }()
	cfg := unix.LoopConfig{Fd: uint32(image.Fd())} //nolint:gosec // a descriptor
	cfg.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], image.Name())
	for range maxAttempts {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, err
		}
		device, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(device.Fd()), &cfg)
		if err == nil {
			return device, nil
		}
		_ = device.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("no free loop device after %d attempts: %w", maxAttempts, errs.ErrExhausted)
}

// grow makes a mounted disk larger.
func grow(image, dir string, size int64) error {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err == nil {
		err = f.Truncate(size)
	}
	if err != nil {
		return err
	}
	device := attached(f)
	if device == nil {
		return fmt.Errorf("loop device of %s not found: %w", image, errs.ErrUnavailable)
	}
	defer func() { _ = device.Close() }()
	if err := unix.IoctlSetInt(int(device.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("grow loop device: %w", err)
	}
	mount, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = mount.Close() }()
	blocks := uint64(size) / 4096 //nolint:gosec // positive
	err = ioctl(mount, ext4Resize, unsafe.Pointer(&blocks))
	if errors.Is(err, unix.EPERM) { // without CAP_SYS_RESOURCE: the next mount does it
		return errors.Join(f.Truncate(info.Size()), unix.IoctlSetInt(int(device.Fd()), unix.LOOP_SET_CAPACITY, 0))
	} else if err != nil {
		return fmt.Errorf("grow file system: %w", err)
	}
	return nil
}

// Unmount unmounts what is mounted at a directory; nothing is success. What uses it still keeps it until it ends.
func Unmount(dir string) error {
	for {
		switch err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		case err != nil:
			return errs.Retryable(fmt.Errorf("unmount disk %s: %w", dir, err))
		}
	}
}

// Discard unmounts a disk whose files are no longer needed: what was not written yet is not written.
func Discard(dir string) error {
	if mounted, err := Mounted(dir); err != nil || !mounted {
		return err
	}
	if f, err := os.Open(dir); err == nil {
		flags := uint32(shutdownNoLog)
		_ = ioctl(f, ext4Shutdown, unsafe.Pointer(&flags)) // without it, the unmount writes for longer
		_ = f.Close()
	}
	return Unmount(dir)
}

// DiscardBelow discards all disks that are mounted below a directory.
func DiscardBelow(dir string) error {
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return eachMounted(dir, Discard)
}

// mountedBelow are the mount points of disks below a directory, the last mounted first.
func mountedBelow(dir string) (found []string, err error) {
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) > 2 && fields[2] == "ext4" && strings.HasPrefix(fields[1], dir+"/") {
			found = append(found, unescape(fields[1]))
		}
	}
	slices.Reverse(found)
	return found, nil
}

// unescape undoes the escapes of /proc/self/mounts.
func unescape(path string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(path)
}

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// copySparse copies the data of a file, and none of its holes.
func copySparse(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if err := removeFile(to); err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if err := out.Truncate(info.Size()); err != nil {
		return err
	}
	for end := int64(0); ; {
		begin, err := unix.Seek(int(in.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		} else if err != nil {
			return err
		}
		if end, err = unix.Seek(int(in.Fd()), begin, unix.SEEK_HOLE); err != nil {
			return err
		}
		if err := copyRange(in, out, begin, end-begin); err != nil {
			return err
		}
	}
}

func copyRange(in, out *os.File, offset, length int64) error {
	for length > 0 {
		i, o := offset, offset
		n, err := unix.CopyFileRange(int(in.Fd()), &i, int(out.Fd()), &o, int(length), 0)
		if err != nil || n == 0 { // not on this file system
			_, err := io.Copy(io.NewOffsetWriter(out, offset), io.NewSectionReader(in, offset, length))
			return err
		}
		offset, length = offset+int64(n), length-int64(n)
	}
	return nil
}
