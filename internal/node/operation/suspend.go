package operation

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// disconnect removes a sandbox from the network, and ends the host's connections to it, which would otherwise
// hang.
func (w *Operation) disconnect(ctx context.Context) error {
	addr := w.Row.Address
	if lease, ok := w.host.cfg.Allocator.Of(w.uid()); ok && !addr.IsValid() {
		addr = lease.Address
	}
	if err := w.detach(ctx); err != nil {
		return err
	}
	for _, a := range []netip.Addr{addr, w.host.Beside(addr)} {
		if err := w.host.cfg.Network.Cut(a); err != nil {
			w.host.cfg.Log.WarnContext(ctx, "cannot end connections to paused sandbox", telemetry.Sandbox, w.Row.Plan.Ref.Name, telemetry.Error, err)
		}
	}
	return nil
}

// clearAddress removes the address from row and record of a sandbox that does not keep it. A failed resume
// does not restore an address to a journal row without one.
func (w *Operation) clearAddress(ctx context.Context, keep bool) error {
	if !w.host.cfg.ReleaseAddresses && w.Row.Kept != agents.SuspendDelete && keep {
		return nil
	}
	w.Row.Address = netip.Addr{}
	if w.Row.Kept == agents.SuspendDelete {
		return nil // its record was removed
	}
	err := w.host.cfg.Containerd.LabelRecord(ctx, w.ID(), LabelAddress, "")
	if errors.Is(err, errs.ErrNotFound) {
		return nil // the orphan scan rewrites it from the row
	}
	return err
}

// ReleaseLease ends the lease of a sandbox whose row has no address.
func (w *Operation) ReleaseLease(ctx context.Context) error {
	if w.Row.Address.IsValid() {
		return nil
	}
	if err := w.releaseAddress(ctx); err != nil {
		return errs.Retryable(err)
	}
	return w.After("released")
}

// reserveAnother reserves an address for a sandbox that released its own.
func (w *Operation) reserveAnother(ctx context.Context) error {
	if err := w.takeAddress(ctx); err != nil {
		return err
	}
	err := w.host.cfg.Containerd.LabelRecord(ctx, w.ID(), LabelAddress, w.Row.Address.String())
	if errors.Is(err, errs.ErrNotFound) {
		return nil
	}
	return err
}

// syncTimeout bounds the agent's sync of the sandbox's files.
const syncTimeout = 30 * time.Second

// Sync makes the agent of a running sandbox write its kernel's cached data to its files.
func (w *Operation) Sync(ctx context.Context) error {
	agent, err := w.host.AgentOf(w.Row.Plan.ID, w.Row.Address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	if err := agent.Freeze(ctx); err != nil {
		return errs.Retryable(fmt.Errorf("sync files by agent: %w", err))
	}
	return nil
}

// stop ends the container of a stored sandbox. A frozen one whose memory is discarded runs shortly before, so
// that its kernel writes cached data to its files; a failure of that is only logged.
func (w *Operation) stop(ctx context.Context) error {
	if w.Row.Kept == agents.SuspendFiles && w.Row.Address.IsValid() {
		if err := w.flushPaused(ctx); err != nil {
			w.host.cfg.Log.WarnContext(ctx, "unwritten file data of sandbox lost", telemetry.Sandbox, w.Row.Plan.Ref.Name, telemetry.Error, err)
		}
	}
	return w.Kill(ctx)
}

// flushPaused makes a frozen container write its files.
func (w *Operation) flushPaused(ctx context.Context) error {
	runtime, err := w.host.Runtime(w.Row)
	if err != nil {
		return err
	}
	if status, err := runtime.State(ctx, w.ID()); err != nil || status != oci.Paused {
		return err
	}
	if err := runtime.Resume(ctx, w.ID()); err != nil {
		return err
	}
	return w.Sync(ctx)
}

// discard removes the data that a stored sandbox does not keep.
func (w *Operation) discard(ctx context.Context) error {
	switch w.Row.Kept {
	case agents.SuspendFiles:
		return w.RemoveMemory(ctx)
	case agents.SuspendDelete:
		return errors.Join(w.removeRecord(ctx), w.removeSidecars(ctx), w.removeOwnFiles(ctx), w.removeSnapshot(ctx))
	case agents.SuspendMemory:
	}
	return nil
}

// restartFromFiles does the steps of a start from files: those of a restart, possibly at another address.
func (w *Operation) restartFromFiles(ctx context.Context) error {
	defer w.closeConsole()
	return w.doAll(ctx, []step{
		{name: "network", do: w.attach},
		{name: "mount", do: w.remount},
		{name: "projected", do: w.refillProjected},
		{name: "readdress", do: w.readdress},
		{name: "start", do: w.start},
		{name: "agent", do: w.awaitAgent},
		{name: "sidecars", do: w.restartSidecars},
		{name: "limit", do: w.LimitCPU},
	})
}

// readdress writes the sandbox's current address into its files, which no process has open.
func (w *Operation) readdress(ctx context.Context) error {
	if err := w.linkAgent(w.host.AgentFile); err != nil { // an older one may not understand newer configuration
		return err
	}
	if !w.moved && !w.Row.Plan.RefersToObjects() {
		return nil
	}
	if _, err := w.rewriteConfig(ctx); err != nil || !w.moved {
		return err
	}
	return errs.Retryable(w.writeSystemFiles())
}

// fromClaims creates a sandbox from its volume claims only, as at first.
func (w *Operation) fromClaims(ctx context.Context) error {
	if err := w.FindImage(ctx); err != nil {
		return err
	}
	w.Row.Warmed = false
	return w.Create(ctx)
}

// Restart creates a new container from its files, in a new network namespace, since a runtime removes the
// address from the old one, and on a new mount, since a reboot removes the old one.
func (w *Operation) Restart(ctx context.Context) error {
	if err := w.Kill(ctx); err != nil {
		return err
	}
	return w.restartFromFiles(ctx)
}

// SaveMemory writes the memory of a frozen sandbox to disk, and makes its files durable.
func (w *Operation) SaveMemory(ctx context.Context) error {
	return w.doAll(ctx, []step{{name: "checkpoint", do: w.checkpoint}, {name: "flush", do: w.flush}})
}

// SaveFiles makes the files of a running sandbox durable.
func (w *Operation) SaveFiles(ctx context.Context) error {
	return w.doAll(ctx, []step{{name: "sync", do: w.Sync}, {name: "flush", do: w.flush}})
}

// Release removes from the host what a stored sandbox neither needs nor keeps. The caller then writes the
// row, and calls ReleaseLease. It may be repeated. With keepAddress the stored row has the sandbox's address.
func (w *Operation) Release(ctx context.Context, keepAddress bool) error {
	err := w.doAll(ctx, []step{
		{name: "stop", do: w.stop},
		{name: "unmount", do: func(ctx context.Context) error {
			return errors.Join(w.unmount(ctx), w.eachSidecar(ctx, (*Operation).unmount))
		}},
		{name: "detach", do: w.disconnect},
		{name: "discard", do: func(ctx context.Context) error { return errors.Join(w.discard(ctx), w.clearAddress(ctx, keepAddress)) }},
	})
	if err != nil {
		return errs.Retryable(err)
	}
	w.Row.Process = lifecycle.Process{}
	if !w.Row.KeepsMemory() {
		w.Row.Build = ""
	}
	return nil
}
