package cgroups

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// OOM is a memory limit whose overrun a program handles in place of the kernel's OOM killer. What needs more memory than the limit that it
// is raised to waits meanwhile; with version 2 what needs more than the first one is slowed down.
type OOM struct {
	controller
	dir string
	// event is readable once the limit was reached.
	event *os.File
	// limit is the first one; now is what it is raised to.
	limit, now int64
}

// controller is what differs between the versions of the memory controller.
type controller interface {
	use(o *OOM) (Use, error)
	raise(o *OOM, limit int64) error
	giveUp(o *OOM) error
}

// OpenOOM takes a cgroup's limit over, in bytes.
func OpenOOM(cgroupsPath string, limit int64) (*OOM, error) {
	if unified() {
		return openHigh(filepath.Join(root, cgroupsPath), limit)
	}
	return openControl(filepath.Join(root, "memory", cgroupsPath), limit)
}

// control is version 1. See memory.oom_control in the kernel's Documentation/admin-guide/cgroup-v1/memory.rst.
type control struct{}

func openControl(dir string, limit int64) (_ *OOM, err error) {
	o := &OOM{controller: control{}, dir: dir, limit: limit}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("make eventfd: %w", err)
	}
	o.event = os.NewFile(uintptr(fd), "eventfd")
	defer func() {
		if err != nil {
			_ = o.event.Close()
		}
	}()
	for file, arguments := range map[string]string{"memory.oom_control": "", "memory.usage_in_bytes": " " + strconv.FormatInt(limit, 10)} {
		if err := o.notify(fd, file, arguments); err != nil {
			return nil, fmt.Errorf("await the limit: %w", err)
		}
	}
	if o.now, err = o.bytes("memory.limit_in_bytes"); err != nil {
		return nil, err
	}
	return o, o.write("memory.oom_control", "1")
}

// notify has the eventfd told of a file's events.
func (o *OOM) notify(fd int, file, arguments string) error {
	f, err := os.Open(o.file(file))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return o.write("cgroup.event_control", fmt.Sprintf("%d %d%s", fd, f.Fd(), arguments))
}

// bytes reads a file of one number.
func (o *OOM) bytes(file string) (int64, error) {
	n, err := readNumber(o.file(file))
	return int64(n), err //nolint:gosec // an impossible limit is a number less than 2^63
}

// Raised returns how much greater the limit is than at first, in bytes: as another process may have left it.
func (o *OOM) Raised() int64 { return o.now - o.limit }

// Wait returns when more came into use than the first limit, or the present one was reached, or ctx is done.
func (o *OOM) Wait(ctx context.Context) error {
	if err := o.event.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = o.event.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := o.event.Read(make([]byte, 4096)); err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	return nil
}

// Use is how much memory is in use, in bytes.
type Use struct {
	// Over is how much more than the first limit is in use without the cache of files, which is reclaimed when it must be.
	Over int64
	// Above is true where more is in use with it: Wait is not told of what comes into use then.
	Above bool
	// Left is how much more can come into use until the present limit; 0 if something waits for memory.
	Left int64
}

// Use reads it.
func (o *OOM) Use() (Use, error) { return o.use(o) }

// inUse reads the memory in use from the names of files and counters that a version has, and how much of it is cache, in bytes.
func (o *OOM) inUse(file string, counters ...string) (all, cache int64, err error) {
	if all, err = o.bytes(file); err != nil {
		return 0, 0, err
	}
	stat, err := readTable(o.file("memory.stat"))
	for _, name := range counters {
		cache += int64(stat[name]) //nolint:gosec // less than what a machine has
	}
	return all, cache, err
}

// Raise makes the limit that much greater than it was at first, in bytes. It fails with EBUSY while more is in use.
func (o *OOM) Raise(bytes int64) error {
	if err := o.raise(o, o.limit+bytes); err != nil {
		return err
	}
	o.now = o.limit + bytes
	return nil
}

// GiveUp leaves the cgroup to the kernel's OOM killer, which ends what waits.
func (o *OOM) GiveUp() error { return o.giveUp(o) }

func (control) use(o *OOM) (Use, error) {
	state, err := readTable(o.file("memory.oom_control"))
	if err != nil {
		return Use{}, err
	}
	all, cache, err := o.inUse("memory.usage_in_bytes", "total_active_file", "total_inactive_file")
	u := Use{Over: all - cache - o.limit, Above: all > o.limit}
	if state["under_oom"] == 0 {
		u.Left = max(1, o.now-all)
	}
	return u, err
}

func (control) raise(o *OOM, limit int64) error {
	files := []string{"memory.limit_in_bytes"}
	if CanLimitSwap() {
		files = append(files, "memory.memsw.limit_in_bytes")
	}
	if limit > o.now { // memory may not be more than memory and swap
		slices.Reverse(files)
	}
	for _, file := range files {
		if err := o.write(file, strconv.FormatInt(limit, 10)); err != nil {
			return err
		}
	}
	return nil
}

func (control) giveUp(o *OOM) error { return o.write("memory.oom_control", "0") }

// Close ends the wait. The kernel's OOM killer stays off.
func (o *OOM) Close() error { return o.event.Close() }

func (o *OOM) file(name string) string { return filepath.Join(o.dir, name) }

func (o *OOM) write(file, text string) error { return os.WriteFile(o.file(file), []byte(text), 0o600) }
