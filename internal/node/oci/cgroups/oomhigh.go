package cgroups

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// high is version 2, which has no switch for the OOM killer: the first limit becomes memory.high, beyond which the kernel reclaims, slows down
// what takes more, and notifies. The OOM killer comes at memory.max, which is what is raised. See the kernel's
// Documentation/admin-guide/cgroup-v2.rst.
type high struct{}

func openHigh(dir string, limit int64) (_ *OOM, err error) {
	o := &OOM{controller: high{}, dir: dir, limit: limit}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("make inotify: %w", err)
	}
	o.event = os.NewFile(uintptr(fd), "inotify")
	defer func() {
		if err != nil {
			_ = o.event.Close()
		}
	}()
	if _, err := unix.InotifyAddWatch(fd, o.file("memory.events"), unix.IN_MODIFY); err != nil {
		return nil, fmt.Errorf("await the limit: watch %s: %w", o.file("memory.events"), err)
	}
	if o.now, err = o.bytes("memory.max"); err != nil {
		return nil, err
	}
	return o, o.write("memory.high", strconv.FormatInt(limit, 10))
}

// use has Above false: the kernel notifies each time that more than memory.high is taken.
func (high) use(o *OOM) (Use, error) {
	all, cache, err := o.cached()
	return Use{Over: all - cache - o.limit, Left: max(1, o.now-all)}, err
}

func (o *OOM) cached() (all, cache int64, err error) {
	return o.inUse("memory.current", "active_file", "inactive_file", "slab_reclaimable")
}

// raise fails as version 1 does: the kernel would take a limit below the use, and end something.
func (high) raise(o *OOM, limit int64) error {
	if limit < o.now {
		if all, cache, err := o.cached(); err != nil {
			return err
		} else if all-cache > limit {
			return fmt.Errorf("memory.max to %d with %d in use: %w", limit, all-cache, unix.EBUSY)
		}
	}
	return o.write("memory.max", strconv.FormatInt(limit, 10))
}

func (high) giveUp(o *OOM) error {
	return errors.Join(o.write("memory.max", strconv.FormatInt(o.limit, 10)), o.write("memory.high", "max"))
}
