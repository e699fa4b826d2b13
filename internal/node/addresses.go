package node

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ipam"
)

// firstLook compares the books of addresses with what lives, before anything allocates, and
// waits for a view that is whole. One that does not come is an errs.ErrUnavailable. Books that
// cannot be written, on a disk that is full, are no reason not to start: each address is checked
// before it is given anyway, and later looks try again.
func (n *Node) firstLook(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, n.bootPatience)
	defer cancel()
	for {
		_, err := n.reconciler.Reconcile(ctx)
		if err == nil {
			return nil
		}
		if n.sighted.Load() {
			n.log.ErrorContext(ctx, "books of addresses not repaired in full", telemetry.Error, err)
			return nil
		}
		n.log.WarnContext(ctx, "addresses in use not known yet; none is given before they are", telemetry.Error, err)
		if !lifecycle.Sleep(ctx, bootPause) {
			return fmt.Errorf("compare addresses with what lives: %w", errs.Retryable(err))
		}
	}
}

// CheckAddresses compares the books of addresses with what lives, now, and tells what it repaired
// or found that it must not repair. An errs.ErrUnavailable means that nothing was decided.
func (n *Node) CheckAddresses(ctx context.Context) ([]ipam.Repair, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	repairs, err := n.reconciler.Reconcile(ctx)
	return repairs, errs.Retryable(err)
}

// Leases tells of all addresses that are not free.
func (n *Node) Leases() []ipam.Lease { return n.allocator.List() }

// Subnets counts the addresses of each subnet by what they are doing, the one that addresses are
// handed out from first.
func (n *Node) Subnets() []ipam.Counts { return n.allocator.Counts() }

// FreeAddress ends the quarantine of an address, for people who know why it was in use; it cools
// down. One that is not quarantined is an errs.ErrConflict that says who has it.
//
// Leases, Subnets and FreeAddress do not wait for the node to have adopted what runs.
func (n *Node) FreeAddress(addr netip.Addr) error { return n.allocator.Free(addr) }
