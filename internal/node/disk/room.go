package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	roomEvery = 200 * time.Millisecond
	// A fortieth of the host's disk is kept, within these bounds.
	leastRoom, mostRoom, roomShare = 64 * mib, 512 * mib, 40
	// ballast fills a disk. Sandboxes do not see it: they see directories beside it.
	ballast = ".ballast"
)

// KeepRoom fills all disks with ballast while the host's disk is nearly full, until ctx is done: sandboxes then get ENOSPC, as from a full disk,
// and not the errors of a disk whose blocks have no place. Ballast itself takes no blocks of the host.
func (s *Store) KeepRoom(ctx context.Context, log *slog.Logger) {
	if s.fault != nil {
		return
	}
	full := true // an earlier process may have left some
	_ = lifecycle.Every(ctx, roomEvery, func() {
		was := full
		var err error
		if full, err = s.CheckRoom(was, dirty()); err != nil {
			log.WarnContext(ctx, "room for disks not kept", telemetry.Error, err)
		}
		if full && !was {
			log.ErrorContext(ctx, "disk nearly full; sandboxes write no more", "directory", s.dir)
		}
	})
}

// CheckRoom does what KeepRoom does, once. full is its last result, dirty the bytes that were written and have no blocks yet.
func (s *Store) CheckRoom(full bool, dirty int64) (bool, error) {
	host := filepath.Dir(s.dir)
	u, err := UsageOf(host)
	if err != nil {
		return full, err
	}
	keep := min(max(u.Total/roomShare, leastRoom), mostRoom)
	free := u.Free - dirty
	switch {
	case free < keep:
		return true, eachMounted(host, fillUp)
	case full && free > 2*keep:
		return false, eachMounted(host, func(dir string) error { return removeFile(filepath.Join(dir, ballast)) })
	}
	return full, nil
}

// dirty is the bytes of files that the kernel has in memory only.
func dirty() (bytes int64) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && (f[0] == "Dirty:" || f[0] == "Writeback:") {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			bytes += n << 10
		}
	}
	return bytes
}

// fillUp takes what is free on a disk.
func fillUp(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, ballast), os.O_CREATE|os.O_WRONLY, 0o600)
	switch {
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrNotExist):
		return nil // it is full, or gone
	case err != nil:
		return err
	}
	defer func() { _ = f.Close() }()
	u, err := UsageOf(dir)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	for size, at := u.Free, info.Size(); size >= mib; {
		err := unix.Fallocate(int(f.Fd()), 0, at, size)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.ENOSPC):
			return fmt.Errorf("fill disk %s: %w", dir, err)
		}
		size -= max(size/16, mib)
	}
	return nil
}

func eachMounted(below string, do func(dir string) error) error {
	dirs, err := mountedBelow(below)
	failures := []error{err}
	for _, dir := range dirs {
		failures = append(failures, do(dir))
	}
	return errors.Join(failures...)
}
