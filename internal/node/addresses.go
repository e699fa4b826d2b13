package node

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/recovery"
)

// firstReconcile compares the address leases with the host before the first allocation. It waits for a complete scan of the
// host; a timeout is an errs.ErrUnavailable. Leases that cannot be written, as on a full disk, do not prevent the start: each
// address is checked before it is allocated, and later reconciles retry.
func (n *Node) firstReconcile(ctx context.Context, rows []journal.Summary, records []ctrd.Container) error {
	ctx, cancel := context.WithTimeout(ctx, n.recovery.BootTimeout)
	defer cancel()
	for {
		_, err := n.reconciler.ReconcileWith(ctx, n.scanWith(func(ctx context.Context) ([]ipam.InUse, error) {
			return n.inventory.InUseWith(ctx, rows, records)
		}))
		if err == nil {
			return nil
		}
		if n.scanned.Load() {
			n.log.ErrorContext(ctx, "address leases not repaired", telemetry.Error, err)
			return nil
		}
		n.log.WarnContext(ctx, "allocation waits for a scan of the addresses in use", telemetry.Error, err)
		if !lifecycle.Sleep(ctx, recovery.BootPause) {
			return fmt.Errorf("compare address leases with the host: %w", errs.Retryable(err))
		}
	}
}

// scanWith returns a list of the addresses in use that notes whether the last one was complete.
func (n *Node) scanWith(list func(context.Context) ([]ipam.InUse, error)) func(context.Context) ([]ipam.InUse, error) {
	return func(ctx context.Context) ([]ipam.InUse, error) {
		all, err := list(ctx)
		n.scanned.Store(err == nil)
		return all, err
	}
}

// CheckAddresses compares the address leases with the host now, and returns what it repaired or must not repair. After an
// errs.ErrUnavailable nothing has changed.
func (n *Node) CheckAddresses(ctx context.Context) ([]ipam.Repair, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	repairs, err := n.reconciler.Reconcile(ctx)
	return repairs, errs.Retryable(err)
}

// Leases returns all addresses that are not free.
func (n *Node) Leases() []ipam.Lease { return n.allocator.List() }

// Subnets counts the addresses of each subnet by state. The first subnet is the one of new addresses.
func (n *Node) Subnets() []ipam.Counts { return n.allocator.Counts() }

// FreeAddress ends the quarantine of an address, which then cools down. An address that is not quarantined is an
// errs.ErrConflict that names its owner.
//
// Leases, Subnets and FreeAddress do not wait for the adoption of sandboxes.
func (n *Node) FreeAddress(addr netip.Addr) error { return n.allocator.Free(addr) }
