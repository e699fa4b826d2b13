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

// disconnect takes a sandbox out of the network, and ends the connections to it: their ends here would
// wait for somebody who cannot answer.
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
			w.host.cfg.Log.WarnContext(ctx, "connections to a sandbox that sleeps are left to wait", telemetry.Sandbox, w.Row.Plan.Ref.Name, telemetry.Error, err)
		}
	}
	return nil
}

// clearAddress takes the address out of the row and the record of a sandbox that does not keep it. What
// the journal has already without an address gets none by a try to wake it that failed.
func (w *Operation) clearAddress(ctx context.Context, keep bool) error {
	if !w.host.cfg.ReleaseAddresses && w.Row.Kept != agents.SuspendDelete && keep {
		return nil
	}
	w.Row.Address = netip.Addr{}
	if w.Row.Kept == agents.SuspendDelete {
		return nil // its record is gone
	}
	err := w.host.cfg.Containerd.LabelRecord(ctx, w.ID(), LabelAddress, "")
	if errors.Is(err, errs.ErrNotFound) {
		return nil // the watchdog writes it again, as the row is
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

// reserveAnother takes an address for a sandbox that gave its own back.
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

// syncTimeout bounds the wait for an agent to write what the sandbox's kernel has to its files.
const syncTimeout = 30 * time.Second

// sync has the agent of a sandbox that runs write to its files what its kernel still has of them.
func (w *Operation) sync(ctx context.Context) error {
	agent, err := w.host.AgentOf(w.Row.Plan.ID, w.Row.Address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	if err := agent.Freeze(ctx); err != nil {
		return errs.Retryable(fmt.Errorf("have its agent write its files: %w", err))
	}
	return nil
}

// stop ends what runs of a sandbox that sleeps on disk. One whose memory was given up while it was
// frozen is let go on before, so that what its kernel had not written yet reaches its files; what
// of that fails is not what the sandbox waits for.
func (w *Operation) stop(ctx context.Context) error {
	if w.Row.Kept == agents.SuspendFiles && w.Row.Address.IsValid() {
		if err := w.flushPaused(ctx); err != nil {
			w.host.cfg.Log.WarnContext(ctx, "what a sandbox had not written to its files yet is lost", telemetry.Sandbox, w.Row.Plan.Ref.Name, telemetry.Error, err)
		}
	}
	return w.Kill(ctx)
}

// flushPaused has a frozen container write its files.
func (w *Operation) flushPaused(ctx context.Context) error {
	runtime, err := w.host.cfg.Runtimes.Driving(w.Row.Plan.Class, w.Row.Build)
	if err != nil {
		return err
	}
	if status, err := runtime.State(ctx, w.ID()); err != nil || status != oci.Paused {
		return err
	}
	if err := runtime.Resume(ctx, w.ID()); err != nil {
		return err
	}
	return w.sync(ctx)
}

// discard removes what a sandbox that sleeps does not keep.
func (w *Operation) discard(ctx context.Context) error {
	switch w.Row.Kept {
	case agents.SuspendFiles:
		return w.RemoveMemory(ctx)
	case agents.SuspendDelete:
		return errors.Join(w.removeRecord(ctx), w.removeOwnFiles(ctx), w.removeSnapshot(ctx))
	case agents.SuspendMemory:
	}
	return nil
}

// restartFromFiles is what a sandbox needs that is started anew from its files: all that a restart does, at an
// address that may be another.
func (w *Operation) restartFromFiles(ctx context.Context) error {
	defer w.closeConsole()
	return w.doAll(ctx, []step{
		{name: "network", do: w.attach},
		{name: "mount", do: w.remount},
		{name: "readdress", do: w.readdress},
		{name: "start", do: w.start},
		{name: "agent", do: w.awaitAgent},
	})
}

// readdress writes into the files of a sandbox, which nothing of it has open, where it is now.
func (w *Operation) readdress(ctx context.Context) error {
	if err := w.replaceAgent(ctx); err != nil {
		return err
	}
	if !w.moved {
		return nil
	}
	if _, err := w.rewriteConfig(); err != nil {
		return err
	}
	return errs.Retryable(w.writeSystemFiles())
}

// fromClaims makes a sandbox of which only the volume claims are left, as if for the first time.
func (w *Operation) fromClaims(ctx context.Context) error {
	image, err := w.host.FindImage(ctx, &w.Row.Plan)
	if err != nil {
		return err
	}
	w.Image = image
	w.Row.Digest, w.Row.ImageEnv, w.Row.ImageRun, w.Row.Warmed = image.Digest, append([]string{}, image.Config.Env...), RunOf(image), false
	return w.Create(ctx)
}

// Restart makes a container anew over the files that it has, in a fresh network namespace, since a
// runtime takes the address out of the one that it is given, and on a fresh mount of its files,
// which a reboot takes away.
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
	return w.doAll(ctx, []step{{name: "sync", do: w.sync}, {name: "flush", do: w.flush}})
}

// Release removes from the host what a stored sandbox neither needs nor keeps. The caller then writes the
// row, and calls releaseLease. It may be repeated. With keepAddress the stored row has the sandbox's address.
func (w *Operation) Release(ctx context.Context, keepAddress bool) error {
	err := w.doAll(ctx, []step{
		{name: "stop", do: w.stop},
		{name: "unmount", do: w.unmount},
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
