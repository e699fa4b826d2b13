package gobench

import (
	"context"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// Cases of the benchmark that are floors, and what the one of a write is called.
const (
	floorGet   = "floor/get"
	floorWrite = "floor/create/1"
	floorMany  = "floor/create/16"

	bareTransaction = "bare etcd transaction"
)

// apiServer is the package whose benchmark runs the API server beside a bare etcd.
const apiServer = "./internal/control/apiserver"

// apiFigures says how to call the benchmark's cases, and which case is the floor of each.
var apiFigures = []struct{ name, title, floor, bare string }{
	{"get", "read a sandbox", floorGet, "bare etcd read"},
	{"create/1", "create a sandbox object", floorWrite, bareTransaction},
	{"create/16", "create, 16 at once", floorMany, "the same of bare etcd"},
	{"update/1", "update a sandbox object", floorWrite, bareTransaction},
	{"update/16", "update, 16 at once", floorMany, "the same of bare etcd"},
	{"update/direct/1", "update as claims do it", floorWrite, bareTransaction},
	{"update/direct/16", "update as claims do it, 16 at once", floorMany, "the same of bare etcd"},
	{"status", "update a status", floorWrite, bareTransaction},
	{"write-to-watch", "update, until a watch has it", floorWrite, bareTransaction},
}

// API runs the API server's own benchmark, which has its floor with it: a transaction
// of a bare etcd on the same disk.
func API(ctx context.Context, b *harness.Bench) error {
	var wanted []string
	for _, f := range apiFigures {
		wanted = append(wanted, f.name, f.floor)
	}
	found, err := Run(ctx, b, apiServer, "BenchmarkAPI", b.Rounds(2000), wanted...)
	if err != nil {
		return err
	}
	for _, f := range apiFigures {
		found[f.name].Add(b.Report, "api", f.title).Over(f.bare, found[f.floor].P50())
	}
	return nil
}

// Transaction measures a transaction of a bare etcd on the same disk: the floor of what is one durable write.
func Transaction(ctx context.Context, b *harness.Bench) (report.Floor, error) {
	found, err := Run(ctx, b, apiServer, "BenchmarkAPI/floor", b.Rounds(1000), floorWrite)
	return report.Floor{Name: bareTransaction, Median: found[floorWrite].P50()}, err
}
