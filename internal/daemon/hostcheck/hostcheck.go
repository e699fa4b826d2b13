// Package hostcheck watches what the server depends on: disk space, memory, writes to the data directory, containerd. It sets
// conditions on the gate that refuses new work.
//
// It stops nothing and removes nothing but its own reserve file.
package hostcheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

// Names of conditions; the API server has its own for the store of objects.
const (
	conditionDisk       = "disk"
	ConditionWrites     = "data directory"
	conditionMemory     = "memory"
	conditionContainerd = "containerd"
	ConditionJournal    = "journal"
)

const (
	// Interval is between checks.
	Interval   = time.Second
	writeEvery = 5 * time.Second
	// slowWrite is how long a small write may take before the condition is set.
	slowWrite = 15 * time.Second
	// containerdPatience limits one check of containerd. Two failures in a row set the condition, because a containerd that
	// restarts answers before the second.
	containerdPatience = 2 * time.Second
	containerdMisses   = 2
)

// Watcher sets conditions of the host on a gate.
type Watcher struct {
	Config *config.Config
	Gate   *health.Gate
	Log    *slog.Logger
}

// WatchContainerd checks that containerd answers, until ctx is done.
func (w Watcher) WatchContainerd(ctx context.Context, check func(ctx context.Context) error) error {
	misses := 0
	return lifecycle.Every(ctx, Interval, func() {
		limited, cancel := context.WithTimeout(ctx, containerdPatience)
		err := check(limited)
		cancel()
		if err == nil {
			misses = 0
		} else {
			misses++
			err = errs.Public(err, "it does not answer; it is started again if it is ours")
		}
		if ctx.Err() == nil && (err == nil || misses >= containerdMisses) {
			w.Gate.Set(conditionContainerd, err)
		}
	})
}

// WatchSpace checks free disk space and memory, and keeps the reserve, until ctx is done.
func (w Watcher) WatchSpace(ctx context.Context) error {
	usual := config.Default()
	disk := diskMark(w.Config)
	inodes := watermark{least: leastInodes, capped: true}
	memory := watermark{least: w.Config.ReserveMemory.Value(), capped: w.Config.ReserveMemory.Equal(usual.ReserveMemory)}
	return lifecycle.Every(ctx, Interval, func() {
		w.Gate.Set(conditionDisk, checkDisks(diskDirs(w.Config), &disk, &inodes))
		free, total, err := ReadMemory()
		if err == nil && memory.low(free, total) {
			err = errs.Public(nil, fmt.Sprintf("%d MiB of memory are free, and %d MiB are kept", free>>20, memory.share(total)>>20))
		}
		w.Gate.Set(conditionMemory, err)
		if err := keepReserve(w.Config.DataDir); err != nil {
			w.Log.DebugContext(ctx, "reserve of disk space not kept", telemetry.Error, err)
		}
	})
}

// WatchWrites writes a small file to the data directory at intervals until ctx is done. A write that hangs delays only the
// next one.
func (w Watcher) WatchWrites(ctx context.Context) error {
	results := make(chan error, 1)
	running, began := false, time.Time{}
	defer func() {
		if running { // a write to a disk that hangs never ends; its goroutine is abandoned
			select {
			case <-results: //nolint:errcheck // too late to use it
			case <-time.After(slowWrite):
			}
		}
	}()
	return lifecycle.Every(ctx, Interval, func() {
		if running {
			select {
			case err := <-results:
				running = false
				w.Gate.Set(ConditionWrites, WriteFault(err))
				if err == nil { // the journal may have met the same fault; its next write shows it
					w.Gate.Set(ConditionJournal, nil)
				}
			default:
				if time.Since(began) > slowWrite {
					w.Gate.Set(ConditionWrites, errs.Public(nil, "a small write to its disk has not come back"))
				}
			}
			return
		}
		if time.Since(began) >= writeEvery || w.Gate.Err() != nil {
			running, began = true, time.Now()
			go func() { results <- durable.CheckWrites(w.Config.DataDir) }() // the deferred function waits
		}
	})
}

// SyncFailed reports whether an error is of a sync, not of a write: only that of a write names a path.
func SyncFailed(err error) bool {
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		return path.Op == "sync"
	}
	_, ok := errors.AsType[unix.Errno](err)
	return ok
}

// WriteFault returns the error of a write with a message for the administrator.
func WriteFault(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errs.Public(err, "its disk is full")
	case errors.Is(err, unix.EROFS):
		return errs.Public(err, "it is mounted read-only")
	case errors.Is(err, unix.EIO):
		return errs.Public(err, "its disk reports errors")
	default:
		return errs.Public(err, "it cannot be written")
	}
}

// diskDirs are the directories whose disks must not run full.
func diskDirs(cfg *config.Config) []string {
	return []string{cfg.DataDir, filepath.Join(cfg.DataDir, "node"), filepath.Join(cfg.DataDir, "containerd", "root")}
}

// watermark remembers whether there was too little of something: it takes some more than the
// mark to be enough again, so that a value on the mark does not open and close the gate.
type watermark struct {
	least  int64 // zero: nothing is too little
	capped bool  // of a small supply only keptShare must be free
	below  bool
}

// keptShare is how much of a small supply is kept, in hundredths.
const keptShare = 5

// share is how much must be free of a supply.
func (w *watermark) share(total int64) int64 {
	if w.capped {
		return min(w.least, total/100*keptShare)
	}
	return w.least
}

func (w *watermark) low(free, total int64) bool {
	mark := w.share(total)
	if w.below {
		mark += mark / 4
	}
	w.below = free < mark
	return w.below
}

// leastInodes must be free on a disk that counts them.
const leastInodes = 10_000

// disk is what is free on one, and what there is.
type disk struct {
	device       unix.Fsid
	free, total  int64 // bytes
	files, nodes int64 // free inodes, and all; zero where they are not counted
}

func diskOf(dir string) (disk, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return disk{}, fmt.Errorf("look at the disk of %s: %w", dir, err)
	}
	return disk{s.Fsid, int64(s.Bavail) * s.Bsize, int64(s.Blocks) * s.Bsize, int64(s.Ffree), int64(s.Files)}, nil //nolint:gosec // as large as disks are
}

// checkDisks returns what is wrong with the first disk that is short of something. Directories
// that are not there are no disks.
func checkDisks(dirs []string, bytes, inodes *watermark) error {
	for _, dir := range dirs {
		d, err := diskOf(dir)
		switch {
		case errors.Is(err, os.ErrNotExist):
			continue
		case err != nil:
			return errs.Public(err, "it cannot be looked at")
		case bytes.low(d.free, d.total):
			return errs.Public(fmt.Errorf("%s: %d of %d bytes are free", dir, d.free, d.total),
				fmt.Sprintf("%d MiB are free, and %d MiB are kept for what runs", d.free>>20, bytes.share(d.total)>>20))
		case d.nodes > 0 && inodes.low(d.files, d.nodes):
			return errs.Public(fmt.Errorf("%s: %d of %d inodes are free", dir, d.files, d.nodes),
				fmt.Sprintf("%d inodes are free, and %d are kept for what runs", d.files, inodes.share(d.nodes)))
		}
	}
	return nil
}

// CheckSpace returns a func that returns an error if bytes more below a directory would leave the disk with
// less than the reserve. Without a reserve all fits.
func CheckSpace(cfg *config.Config) func(dir string, bytes int64) error {
	mark := diskMark(cfg)
	return func(dir string, bytes int64) error {
		if mark.least == 0 {
			return nil
		}
		d, err := diskOf(dir)
		for errors.Is(err, os.ErrNotExist) && dir != filepath.Dir(dir) {
			dir = filepath.Dir(dir)
			d, err = diskOf(dir)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", err, errs.ErrUnavailable)
		}
		if kept := mark.share(d.total); d.free-bytes < kept {
			return errs.Public(fmt.Errorf("%d bytes below %s: %w", bytes, dir, errs.ErrExhausted),
				fmt.Sprintf("it may need %d MiB of disk space; %d MiB are free, and %d MiB are kept for what runs", (bytes+1<<20-1)>>20, d.free>>20, kept>>20))
		}
		return nil
	}
}

// imageShare is the largest part of a disk that images take unless a limit is set, in percent.
const imageShare = 40

// ImageLimit returns the bytes that images may take; zero: any.
func ImageLimit(cfg *config.Config) int64 {
	limit := cfg.ImageStore.Value()
	if d, err := diskOf(cfg.DataDir); err == nil && cfg.ImageStore.Equal(config.Default().ImageStore) {
		limit = min(limit, d.total/100*imageShare)
	}
	return limit
}

// DiskTotal returns the size of the file system below a directory, in bytes.
func DiskTotal(dir string) (int64, error) {
	d, err := diskOf(dir)
	return d.total, err
}

// diskMark is the mark for free disk space.
func diskMark(cfg *config.Config) watermark {
	return watermark{least: cfg.ReserveDisk.Value(), capped: cfg.ReserveDisk.Equal(config.Default().ReserveDisk)}
}

// ReadMemory returns how many bytes programs can still get, and how many there are.
func ReadMemory() (free, total int64, err error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, errs.Public(err, "it cannot be looked at")
	}
	return parseMemory(string(text))
}

// MemoryLow returns a function that reports whether less memory is free than a number of bytes; nil for 0. What cannot be read is not low.
func MemoryLow(below int64) func() bool {
	if below <= 0 {
		return nil
	}
	return func() bool {
		free, _, err := ReadMemory()
		return err == nil && free < below
	}
}

// Conditions returns the conditions of a gate for the administrator.
func Conditions(g *health.Gate) (out []adminclient.Condition) {
	for _, c := range g.Conditions() {
		out = append(out, adminclient.Condition{Name: c.Name, Reason: c.Reason, Detail: c.Detail, Since: c.Since})
	}
	return out
}

// remedies are the operator's actions by condition.
var remedies = map[string]string{
	conditionDisk:       "free space there, or delete sandboxes; reserveDisk is the reserve",
	ConditionWrites:     "repair its disk; the server recovers automatically",
	conditionMemory:     "delete sandboxes, or add memory; reserveMemory is the reserve",
	conditionContainerd: "see containerd/containerd.log in the data directory",
	ConditionJournal:    "repair the disk of the data directory",
}

// Checks returns the conditions of a gate as findings of a doctor.
func Checks(g *health.Gate) (out []adminclient.Check) {
	for _, c := range g.Conditions() {
		out = append(out, adminclient.Check{
			Name: "server: " + c.Name, State: adminclient.CheckFailed, Detail: cmp.Or(c.Reason, c.Detail),
			Remedy: cmp.Or(remedies[c.Name], "new work is accepted when it has passed"),
		})
	}
	return out
}
