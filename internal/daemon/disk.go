package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
)

// ErrReexec says that the server has ended over its disk, and that the program should start
// itself again in the place of this process, with [Config.Anew] set: it then waits until the disk
// is well. Sandboxes run on meanwhile.
var ErrReexec = errors.New("the server has to begin anew")

// abandonAfter is how long parts may take to stop whose storage has failed.
const abandonAfter = 15 * time.Second

// awaitDisk is the first phase. What is wrong with the disk is told at once to whoever starts the
// server; one that begins anew waits until it has passed, and meanwhile tells everybody why.
func (d *Daemon) awaitDisk(ctx context.Context) error {
	err := hostcheck.Startable(d.cfg.DataDir)
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
	tick := time.NewTicker(hostcheck.Interval)
	defer tick.Stop()
	for {
		err := hostcheck.Startable(d.cfg.DataDir)
		d.health.Set(hostcheck.ConditionWrites, err)
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

// journalWritten is told how each write of the node's journal went. After a sync that failed the
// kernel may show what never reached the disk, and takes it for written: only what is read anew
// can be trusted.
func (d *Daemon) journalWritten(err error) {
	if err == nil {
		return
	}
	d.health.Set(hostcheck.ConditionJournal, hostcheck.WriteFault(err))
	if hostcheck.SyncFailed(err) {
		select {
		case d.broken <- fmt.Errorf("%w: the node's journal: %w", apiserver.ErrStorage, err):
		default: // it is known
		}
	}
}
