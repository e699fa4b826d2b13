package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver/etcd"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
)

// ErrReexec means that the server ended because of its disk. The program should execute itself again
// with [Config.AfterReexec] set, and then waits until the disk has recovered. Sandboxes keep running.
var ErrReexec = errors.New("server must restart in place")

// abandonAfter is how long parts may take to stop whose storage has failed.
const abandonAfter = 15 * time.Second

// awaitDisk is the first phase. A disk fault fails a first start at once; after a reexec the server
// waits until the fault has passed, and reports it meanwhile.
func (d *Daemon) awaitDisk(ctx context.Context) error {
	err := hostcheck.Startable(d.cfg.DataDir)
	if err == nil || !d.cfg.AfterReexec {
		return err
	}
	var stack lifecycle.Stack
	defer func() { // a failed report does not stop the boot
		if err := stack.Stop(); err != nil {
			d.log.DebugContext(ctx, "answers while the disk was not well", telemetry.Error, err)
		}
	}()
	if d.plain, err = d.bind(ctx, "httpAddr", d.cfg.HTTPAddr, nil); err != nil {
		return err
	}
	if err := boot.Push(ctx, &stack, boot.Background("http", d.plain.Run)); err != nil {
		return err
	}
	if err := d.bindMetrics(ctx); err != nil {
		return err
	}
	if d.metricsFront != nil {
		if err := boot.Push(ctx, &stack, boot.Background("metrics", d.metricsFront.Run)); err != nil {
			return err
		}
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

// bindMetrics takes the address of the metrics, which tell why the server is not ready.
func (d *Daemon) bindMetrics(ctx context.Context) (err error) {
	if d.cfg.MetricsAddr == "" {
		return nil
	}
	if d.metricsFront, err = d.bind(ctx, "metricsAddr", d.cfg.MetricsAddr, nil); err != nil {
		return err
	}
	d.metricsFront.Open(d.details())
	return nil
}

// isDiskFault reports whether an error passes when the operator repairs the disk.
func isDiskFault(err error) bool {
	for _, fault := range []error{etcd.ErrStorage, unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EIO} {
		if errors.Is(err, fault) {
			return true
		}
	}
	return false
}

// lost returns cause, or ErrReexec with it if a new process can wait for the disk.
func (d *Daemon) lost(ctx context.Context, cause error) error {
	passes := errors.Is(cause, etcd.ErrStorage) || (d.cfg.AfterReexec && isDiskFault(cause))
	if ctx.Err() != nil || !passes {
		return cause
	}
	d.log.ErrorContext(ctx, "disk failed; restarting, sandboxes keep running",
		"remedy", "free space or repair the disk", "dir", d.cfg.DataDir, telemetry.Error, cause)
	return fmt.Errorf("%w: %w", ErrReexec, cause)
}

// stopAll stops all parts. It abandons those that wait for failed storage.
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
		return fmt.Errorf("%w: not everything could be stopped in order", etcd.ErrStorage)
	}
}

// journalWritten receives the result of each write of the node's journal. After a failed sync the kernel
// may show data that never reached the disk as written: only data that is read again can be trusted.
func (d *Daemon) journalWritten(err error) {
	if err == nil {
		return
	}
	d.health.Set(hostcheck.ConditionJournal, hostcheck.WriteFault(err))
	if hostcheck.SyncFailed(err) {
		select {
		case d.broken <- fmt.Errorf("%w: the node's journal: %w", etcd.ErrStorage, err):
		default: // it is known
		}
	}
}
