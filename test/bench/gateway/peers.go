package gateway

import (
	"context"
	"errors"

	"github.com/barchan-dev/barchan/test/bench/gobench"
	"github.com/barchan-dev/barchan/test/bench/harness"
)

// Bars of an event at one manager that all gateways know.
const (
	peersBar     = 5  // ms, median
	peersSlowBar = 50 // ms, 99 of a hundred
)

// Peers has one replica make sandboxes on a node that is played, and queries the gateways of the
// others until they lead there, beside the same question to the gateway that knows at once. A test
// that is killed removes nothing: what an interrupted run has left goes at its end, or at the next.
func Peers(ctx context.Context, b *harness.Bench) (err error) {
	if err := sweepClusters(ctx, b); err != nil {
		return err
	}
	defer func() {
		if ctx.Err() != nil {
			err = errors.Join(err, sweepClusters(ctx, b))
		}
	}()
	found, err := gobench.Run(ctx, b, "./test/e2e", "BenchmarkPeers", b.Rounds(500), "own", "others") // replicas in network namespaces of their own
	if err != nil {
		return err
	}
	own, others := found["own"], found["others"]
	others.Add(b.Report, "peers", "new sandbox, until two other gateways lead to it").Over("its own gateway's answer", own.P50()).AtMost(peersBar)
	slow := b.Report.One("peers", "the same, 99 of a hundred", "ms", others.P99())
	slow.N = others.N
	slow.AtMost(peersSlowBar)
	return nil
}
