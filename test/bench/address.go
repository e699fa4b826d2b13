package main

import (
	"context"
	"fmt"
)

// addressBenchmark is the package of the allocator, whose benchmark has its baseline with it.
const addressBenchmark = "./internal/node/ipam"

// measureAddress takes addresses from lease tables that are nearly empty and nearly full, beside a bare
// commit of the same database.
func measureAddress(ctx context.Context, b *bench) error {
	found, err := b.benchmarks(ctx, addressBenchmark, "BenchmarkReserve", b.rounds(500))
	if err != nil {
		return err
	}
	bare, ok := found["bare_commit"]
	if !ok {
		return fmt.Errorf("the benchmark of %s did not print its floor", addressBenchmark)
	}
	for _, f := range []struct{ name, title string }{
		{"1000_of_65533", "reserve an address, 1,000 of 65,533 taken"}, {"65500_of_65533", "reserve an address, 65,500 of 65,533 taken"},
	} {
		r, ok := found[f.name]
		if !ok {
			return fmt.Errorf("the benchmark of %s did not print %s", addressBenchmark, f.name)
		}
		p99 := r.metrics["p99-µs"] / 1000
		b.report.Figures = append(b.report.Figures, (&figure{
			Group: "address", Name: f.title, Unit: "ms", Median: r.metrics["p50-µs"] / 1000, P99: &p99, N: r.n,
		}).over("bare bbolt commit", bare.metrics["p50-µs"]/1000))
	}
	return nil
}
