package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
)

// ErrReexec says that the server has ended over its disk, and that the program should start
// itself again in the place of this process, with [Config.Anew] set: it then waits until the disk
// is well. Sandboxes run on meanwhile.
var ErrReexec = errors.New("the server has to begin anew")

const (
	// reserveFile takes room that is given up when the disk is full otherwise, so that the server
	// can still write what ends sandboxes, and can start.
	reserveFile = "reserve"
	reserveMost = 128 << 20 // bytes, where that is not a larger part of the disk than reservePart
	reservePart = 16
	// bootRoom is what must be free to start: etcd takes 64 MiB for its log ahead.
	bootRoom = 80 << 20
	// abandonAfter is how long parts may take to stop whose storage has failed.
	abandonAfter = 15 * time.Second
)

// parseMemory reads /proc/meminfo.
func parseMemory(text string) (free, total int64, err error) {
	for line := range strings.Lines(text) {
		var into *int64
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "MemAvailable":
			into = &free
		case "MemTotal":
			into = &total
		default:
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		if err != nil {
			return 0, 0, errs.Public(fmt.Errorf("/proc/meminfo: %s: %w", key, err), "it cannot be looked at")
		}
		*into = kib << 10
	}
	if total == 0 {
		return 0, 0, errs.Public(errors.New("/proc/meminfo has no MemTotal"), "it cannot be looked at")
	}
	return free, total, nil
}

// keepReserve takes the reserve where there is plenty of room, and gives it up where there is
// hardly any.
func keepReserve(dir string) error {
	d, err := diskOf(dir)
	if err != nil {
		return err
	}
	path, size := filepath.Join(dir, reserveFile), min(reserveMost, d.total/reservePart)
	switch {
	case d.free < size/4:
		return durable.Remove(path)
	case d.free > 4*size:
		return durable.Reserve(path, size)
	}
	return nil
}

// dropReserve gives the reserve up if it is needed to start.
func dropReserve(dir string) error {
	d, err := diskOf(dir)
	if err != nil || d.free >= bootRoom {
		return err
	}
	return durable.Remove(filepath.Join(dir, reserveFile))
}

// hasRoom says why the server cannot start in its data directory, if it cannot.
func (d *Daemon) hasRoom() error {
	dir := d.cfg.DataDir
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	if err := dropReserve(dir); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	now, err := diskOf(dir)
	if err != nil {
		return err
	}
	if now.free < bootRoom {
		return errs.Public(unix.ENOSPC, fmt.Sprintf("%s: its disk has %d MiB free, and %d MiB are needed to start; free some", dir, now.free>>20, bootRoom>>20))
	}
	if err := durable.CheckWrites(dir); err != nil {
		text, _ := errs.PublicMessage(writeFault(err))
		return errs.Public(err, fmt.Sprintf("%s: %s; mend that, then start the server", dir, text))
	}
	return nil
}

// awaitDisk is the first phase. What is wrong with the disk is told at once to whoever starts the
// server; one that begins anew waits until it has passed, and meanwhile tells everybody why.
func (d *Daemon) awaitDisk(ctx context.Context) error {
	err := d.hasRoom()
	if err == nil || !d.cfg.AfterReexec {
		return err
	}
	var stack lifecycle.Stack
	defer func() { // what could not be told is nothing to stop a boot for
		if err := stack.Stop(); err != nil {
			d.log.DebugContext(ctx, "answers while the disk was not well", telemetry.Error, err)
		}
	}()
	if d.plain, err = d.bind(ctx, "httpAddr", d.cfg.HTTPAddr, nil); err != nil {
		return err
	}
	if err := boot.Push(ctx, &stack, boot.Background("http", d.plain.run)); err != nil {
		return err
	}
	if err = d.makeAdmin(); err == nil {
		err = boot.Push(ctx, &stack, boot.Background("admin", d.admin.Run))
	}
	if err != nil { // the socket may need the disk
		d.log.WarnContext(ctx, "no administration meanwhile", telemetry.Error, err)
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		err := d.hasRoom()
		d.health.Set(conditionWrites, err)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// isDiskFault reports whether an error is of the kind that passes when somebody mends the disk.
func isDiskFault(err error) bool {
	for _, fault := range []error{apiserver.ErrStorage, unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EIO} {
		if errors.Is(err, fault) {
			return true
		}
	}
	return false
}

// lost is what becomes of a server whose boot or whose parts have failed with cause: nothing, or
// it begins anew.
func (d *Daemon) lost(ctx context.Context, cause error) error {
	passes := errors.Is(cause, apiserver.ErrStorage) || (d.cfg.AfterReexec && isDiskFault(cause))
	if ctx.Err() != nil || !passes {
		return cause
	}
	d.log.ErrorContext(ctx, "the server cannot go on over its disk, and begins anew when that is well; sandboxes run on. "+
		"Free space there, or mend it", "dir", d.cfg.DataDir, telemetry.Error, cause)
	return fmt.Errorf("%w: %w", ErrReexec, cause)
}

// stopAll stops all parts. Those that wait for a storage that has failed are not waited for.
func (d *Daemon) stopAll(stack *lifecycle.Stack) error {
	done := make(chan error, 1)
	go func() { done <- stack.Stop() }() // waited for, but below
	if d.api == nil {
		return <-done
	}
	select {
	case err := <-done:
		return err
	case <-d.api.StorageFailed():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(abandonAfter):
		return fmt.Errorf("%w: not everything could be stopped in order", apiserver.ErrStorage)
	}
}
