package gobench

import (
	"context"

	"github.com/barchan-dev/barchan/test/bench/harness"
)

// Address takes addresses from lease tables that are nearly empty and nearly full, beside a bare
// commit of the same database.
func Address(ctx context.Context, b *harness.Bench) error {
	const bare, empty, full = "bare_commit", "1000_of_65533", "65500_of_65533"
	found, err := Run(ctx, b, "./internal/node/ipam", "BenchmarkReserve", b.Rounds(500), bare, empty, full)
	if err != nil {
		return err
	}
	found[empty].Add(b.Report, "address", "reserve an address, 1,000 of 65,533 taken").Over("bare bbolt commit", found[bare].P50())
	found[full].Add(b.Report, "address", "reserve an address, 65,500 of 65,533 taken").Over("bare bbolt commit", found[bare].P50())
	return nil
}
