package node

import (
	"context"
	"errors"
	"net/netip"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// The address of a sandbox that sleeps on disk is its own, unless Config.ReleaseAddresses says that
// it is given back, or only its volume claims are kept. The order of giving it back is
//
//	label of the record → row of the journal, without it → books
//
// so that an address in the books of nobody is in nobody's row. A lease that a death leaves behind
// goes at the next start ([Node.atRest]). A wake takes an address as a create does: the row has it
// from when it says live again, and until then the books alone.

// disconnect takes a sandbox out of the network, and ends the connections to it: their ends here would
// wait for somebody who cannot answer.
func (w *operation) disconnect(ctx context.Context) error {
	addr := w.row.Address
	if lease, ok := w.n.allocator.Of(w.uid()); ok && !addr.IsValid() {
		addr = lease.Address
	}
	if err := w.detach(ctx); err != nil {
		return err
	}
	for _, a := range []netip.Addr{addr, w.n.beside(addr)} {
		if err := w.n.network.Cut(a); err != nil {
			w.n.log.WarnContext(ctx, "connections to a sandbox that sleeps are left to wait", telemetry.Sandbox, w.row.Plan.Ref.Name, telemetry.Error, err)
		}
	}
	return nil
}

// clearAddress takes the address out of the row and the record of a sandbox that does not keep it. What
// the journal has already without an address gets none by a try to wake it that failed.
func (w *operation) clearAddress(ctx context.Context, u *registry.Handle) error {
	noted := u.Row()
	if !w.n.cfg.ReleaseAddresses && w.row.Kept != agents.SuspendDelete && noted != nil && noted.Address.IsValid() {
		return nil
	}
	w.row.Address = netip.Addr{}
	if w.row.Kept == agents.SuspendDelete {
		return nil // its record is gone
	}
	err := w.n.cfg.Containerd.LabelRecord(ctx, w.id(), labelAddress, "")
	if errors.Is(err, errs.ErrNotFound) {
		return nil // the watchdog writes it again, as the row is
	}
	return err
}

// releaseLease ends the lease of a sandbox whose row has no address.
func (w *operation) releaseLease(ctx context.Context) error {
	if w.row.Address.IsValid() {
		return nil
	}
	if err := w.releaseAddress(ctx); err != nil {
		return errs.Retryable(err)
	}
	return w.after("released")
}

// takeAnother takes an address for a sandbox that gave its own back.
func (w *operation) takeAnother(ctx context.Context) error {
	if err := w.takeAddress(ctx); err != nil {
		return err
	}
	err := w.n.cfg.Containerd.LabelRecord(ctx, w.id(), labelAddress, w.row.Address.String())
	if errors.Is(err, errs.ErrNotFound) {
		return nil
	}
	return err
}
