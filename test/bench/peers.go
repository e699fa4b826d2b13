package main

import (
	"context"
	"errors"
	"fmt"
)

// Bars of an event at one manager that all gateways know.
const (
	peersBar     = 5  // ms, median
	peersSlowBar = 50 // ms, 99 of a hundred
)

// peersBenchmark is the package whose benchmark has three replicas in network namespaces of their own.
const peersBenchmark = "./test/e2e"

// measurePeers has one replica make sandboxes on a node that is played, and queries the gateways of the
// others until they lead there, beside the same question to the gateway that knows at once. A test
// that is killed removes nothing: what an interrupted run has left goes at its end, or at the next.
func measurePeers(ctx context.Context, b *bench) (err error) {
	if err := b.sweepClusters(ctx); err != nil {
		return err
	}
	defer func() {
		if ctx.Err() != nil {
			err = errors.Join(err, b.sweepClusters(ctx))
		}
	}()
	found, err := b.benchmarks(ctx, peersBenchmark, "BenchmarkPeers", b.rounds(500))
	if err != nil {
		return err
	}
	own, ok := found["own"]
	others, alsoOK := found["others"]
	if !ok || !alsoOK {
		return fmt.Errorf("the benchmark of %s did not print both own and others", peersBenchmark)
	}
	p50, p99 := others.metrics["p50-µs"]/1000, others.metrics["p99-µs"]/1000
	all := (&figure{
		Group: "peers", Name: "new sandbox, until two other gateways lead to it", Unit: "ms", Median: p50, P99: &p99, N: others.n,
	}).over("its own gateway's answer", own.metrics["p50-µs"]/1000)
	all.atMost(peersBar)
	slow := &figure{Group: "peers", Name: "the same, 99 of a hundred", Unit: "ms", Median: p99, N: others.n}
	slow.atMost(peersSlowBar)
	b.report.Figures = append(b.report.Figures, all, slow)
	return nil
}
